// Columns come in base64, little-endian, as ledgers hold them.

function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
const integers = (text) => new Int32Array(bytesOf(text).buffer);
const floats = (text) => new Float32Array(bytesOf(text).buffer);

// A rollout: its turns by index, their children, and the leaf that trains each turn (law 3).
class Rollout {
  constructor(data) {
    this.data = data;
    this.labels = new Map();
    this.turns = new Map(data.turns.map((turn) => [turn.index, turn]));
    const extended = new Set(data.turns.map((turn) => turn.parent));
    this.leaves = data.turns.filter((turn) => !extended.has(turn.index)).map((turn) => turn.index);
    this.leafOf = new Map(); // turn -> first leaf in commit order whose path holds it
    for (const leaf of this.leaves) {
      for (let at = this.turns.get(leaf); at && !this.leafOf.has(at.index); at = this.turns.get(at.parent)) {
        this.leafOf.set(at.index, leaf);
      }
    }
    this.below = new Map();
    for (const turn of data.turns) {
      const parent = this.turns.has(turn.parent) ? turn.parent : null;
      this.below.set(parent, [...(this.below.get(parent) ?? []), turn]);
    }
  }

  path(leaf) {
    const turns = [];
    for (let at = this.turns.get(leaf); at; at = this.turns.get(at.parent)) turns.push(at);
    return turns.reverse();
  }

  isContext(turn, leaf) {
    return this.data.context ? this.data.context.includes(turn.index) : this.leafOf.get(turn.index) !== leaf;
  }

  count(of) {
    return this.data.turns.reduce((sum, turn) => sum + of(turn), 0);
  }

  note(name) {
    return this.data.notes.find((note) => note.name === name && note.turn === null)?.value ?? null;
  }

  piece(id) {
    return this.data.text ? this.data.pieces[id] ?? "" : null;
  }

  // The text of a token that holds whole characters; its id if the text is unknown.
  shown(id) {
    let label = this.labels.get(id);
    if (label === undefined) {
      const piece = this.piece(id);
      label = piece === null ? `${id} ` : piece === "" ? `⟨${id}⟩` : shownPiece(Array.isArray(piece) ? partLabels([piece])[0] : piece);
      this.labels.set(id, label);
    }
    return label;
  }
}

const shownPiece = (text) => visible(text).replaceAll("\n", "↵\n");

// The text of tokens that share a character: the first token shows the whole character.
function partLabels(pieces) {
  const bytes = [], owners = [];
  pieces.forEach((piece, owner) => {
    const own = typeof piece === "string" ? new TextEncoder().encode(piece) : piece[0].match(/../g).map((two) => parseInt(two, 16));
    for (const byte of own) { bytes.push(byte); owners.push(owner); }
  });
  const labels = pieces.map(() => "");
  const strict = new TextDecoder("utf-8", { fatal: true });
  for (let at = 0; at < bytes.length;) {
    const first = bytes[at];
    const size = first < 0x80 ? 1 : first >> 5 === 6 ? 2 : first >> 4 === 14 ? 3 : first >> 3 === 30 ? 4 : 0;
    try {
      if (!size || at + size > bytes.length) throw new TypeError("part of a character");
      labels[owners[at]] += strict.decode(new Uint8Array(bytes.slice(at, at + size)));
      at += size;
    } catch {
      labels[owners[at]] += `⟨${first.toString(16)}⟩`;
      at += 1;
    }
  }
  return labels.map((label) => label || "‥");
}
