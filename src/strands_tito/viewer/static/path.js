// One root-to-leaf path as index-aligned columns of one length.

const PROVENANCE = ["prompt", "scaffold", "inserted", "sampled", "constrained"];
const [INSERTED, SAMPLED, CONSTRAINED] = [2, 3, 4];
const MEANING = {
  prompt: "content of a message",
  scaffold: "text of the chat template",
  inserted: "a closer that the engine never sampled, added after a truncation",
  sampled: "the policy's own token",
  constrained: "sampled under a grammar",
};

class Path {
  constructor(rollout, leaf) {
    this.rollout = rollout;
    this.leaf = leaf;
    this.turns = rollout.path(leaf);
    this.length = this.turns.reduce((sum, turn) => sum + turn.prompt + turn.output, 0);
    this.id = new Int32Array(this.length);
    this.kind = new Uint8Array(this.length);
    this.trained = new Uint8Array(this.length);
    this.version = new Int16Array(this.length).fill(-1);
    for (const name of ["logprob", "promptLogprob", "entropy", "difference"]) this[name] = new Float32Array(this.length).fill(NaN);
    this.versions = [];
    this.starts = [];
    let at = 0;
    for (const turn of this.turns) {
      this.starts.push(at);
      this.fill(turn, at);
      at += turn.prompt + turn.output;
    }
  }

  fill(turn, start) {
    const middle = start + turn.prompt, stop = middle + turn.output;
    this.id.set(integers(turn.ids), start);
    this.kind.set(bytesOf(turn.provenance), start);
    this.kind.fill(turn.constrained ? CONSTRAINED : SAMPLED, middle, stop);
    this.logprob.set(floats(turn.logprobs), middle);
    if (!turn.constrained && !this.rollout.isContext(turn, this.leaf)) this.trained.fill(1, middle, stop);
    if (turn.differences) this.difference.set(floats(turn.differences), middle);
    if (turn.top) this.place(this.entropy, floats(turn.top.entropy), start + turn.top.start);
    if (turn.promptLogprobs) this.place(this.promptLogprob, floats(turn.promptLogprobs.values), start + turn.promptLogprobs.start);
    for (const [from, to, name] of turn.versions) {
      const label = name === null ? "unknown" : name;
      if (!this.versions.includes(label)) this.versions.push(label);
      this.version.fill(this.versions.indexOf(label), middle + from, middle + to);
    }
  }

  place(column, values, start) {
    column.set(values.subarray(0, Math.max(0, this.length - start)), start);
  }

  has(column) {
    return this[column].some((value) => !Number.isNaN(value));
  }

  // The position in `turns` of the turn that holds a token.
  turnAt(token) {
    let low = 0, high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= token) low = middle; else high = middle - 1;
    }
    while (low + 1 < this.starts.length && this.starts[low + 1] === this.starts[low]) low++; // turns without tokens
    return low;
  }

  // A token's turn and its offset in the turn's output; negative offsets are in the delta.
  locate(token) {
    const place = this.turnAt(token), turn = this.turns[place];
    return { place, turn, inTurn: token - this.starts[place], inOutput: token - this.starts[place] - turn.prompt };
  }

  callAt(token) {
    const { turn, inOutput } = this.locate(token);
    return inOutput < 0 ? null : turn.calls.find((call) => call.start <= inOutput && inOutput < call.stop) ?? null;
  }

  driftAt(token) {
    const { turn, inOutput } = this.locate(token);
    return inOutput < 0 ? null : turn.drift.find(([start, stop]) => start <= inOutput && inOutput < stop) ?? null;
  }

  mediaAt(token) {
    const { turn, inTurn } = this.locate(token);
    return turn.media.find(([start, length]) => start <= inTurn && inTurn < start + length) ?? null;
  }

  isStop(token) {
    const { turn, inOutput } = this.locate(token);
    return turn.stop !== null && inOutput === turn.output - 1 && this.id[token] === turn.stop;
  }

  // The text of tokens `start` to `stop`, one string each.
  labels(start, stop) {
    const labels = [];
    for (let at = start; at < stop;) {
      const piece = this.rollout.piece(this.id[at]);
      let end = at + 1;
      if (Array.isArray(piece)) {
        while (end < stop && Array.isArray(this.rollout.piece(this.id[end]))) end++;
        const parts = [];
        for (let i = at; i < end; i++) parts.push(this.rollout.piece(this.id[i]));
        labels.push(...partLabels(parts).map(shownPiece));
      } else {
        labels.push(this.rollout.shown(this.id[at]));
      }
      at = end;
    }
    return labels;
  }
}
