// The forest of turns, and the heading and engine record of each turn.

function branchTree(rollout, path, go) {
  const items = [];
  const waiting = [...(rollout.below.get(null) ?? [])].reverse().map((turn) => [turn, 0]);
  const isFork = (rollout.below.get(null) ?? []).length > 1;
  const onPath = new Set(path.turns.map((turn) => turn.index));
  const areSeveral = new Set(rollout.data.turns.map((turn) => turn.agent)).size > 1;
  while (waiting.length) {
    const [turn, depth] = waiting.pop();
    items.push(treeItem(areSeveral ? turn : { ...turn, agent: null }, depth, onPath.has(turn.index), isFork, go));
    const below = rollout.below.get(turn.index) ?? [];
    for (const next of [...below].reverse()) waiting.push([next, below.length > 1 ? depth + 1 : depth]);
  }
  return el("nav", { class: "tree", "aria-label": "Turns and branches" }, el("h2", {}, "Turns"), el("ol", {}, items));
}

function treeItem(turn, depth, isOnPath, isFork, go) {
  const kinds = turn.calls.map(callKind), bad = kinds.filter((kind) => kind === "bad").length;
  const suspect = kinds.filter((kind) => kind === "suspect").length, calls = kinds.length - suspect;
  const button = el("button", { type: "button", class: `turn-link ${isOnPath ? "on" : ""}`, "data-turn": turn.index, onclick: () => go(turn.index) },
    el("span", { class: "name" }, `turn ${turn.index}`), el("span", { class: "size" }, `${turn.prompt}+${turn.output}`),
    turn.agent ? chip(visible(turn.agent)) : null,
    turn.finish === "stop" ? null : chip(turn.finish, "warn"),
    calls ? chip(callsText(calls, bad), bad ? "bad" : "ok") : null,
    suspect ? chip(count(suspect, "text like a call", "texts like calls"), "warn") : null,
    turn.branch ? el("span", { class: "why" }, `↳ ${visible(turn.branch.why)}`) : null);
  const item = el("li", {}, button);
  item.style.paddingInlineStart = `${Math.min(depth, 12) * 0.9}rem`;
  return item;
}

function callsText(calls, bad) {
  return bad === calls ? count(bad, "bad call") : count(calls, "call") + (bad ? `, ${bad} bad` : "");
}

function turnHeading(path, place) {
  const turn = path.turns[place], start = path.starts[place];
  const inserted = path.kind.subarray(start, start + turn.prompt).filter((kind) => kind === INSERTED).length;
  const isContext = path.rollout.isContext(turn, path.leaf);
  const chips = [
    turn.agent && chip(visible(turn.agent)),
    chip(turn.finish, turn.finish === "stop" ? "" : "warn"),
    turn.constrained && chip("constrained"),
    turn.open && chip("reasoning left open", "warn"),
    inserted > 0 && chip(`${count(inserted, "token")} inserted`, "warn"),
    turn.drift.length > 0 && chip("drift: its text would re-tokenize differently", "warn"),
    turn.media.length > 0 && chip(count(turn.media.length, "picture")),
    isContext && chip("context here: an earlier trajectory trains it"),
    turn.branch && branchChip(path, turn),
  ];
  const notes = path.rollout.data.notes.filter((note) => note.turn === turn.index).map((note) => [visible(note.name), visible(note.value)]);
  const stop = start + turn.prompt + turn.output;
  return el("header", { class: "turn-head" },
    el("h2", {}, `Turn ${turn.index}`), el("span", { class: "size" }, `tokens ${start.toLocaleString("en")} to ${stop.toLocaleString("en")}, +${turn.prompt} prompt, ${turn.output} sampled`),
    chips.filter(Boolean),
    el("details", {}, el("summary", {}, "Engine record"), listOf([...turn.record.map(([name, value]) => [name, visible(value)]), ["sampling", pairsOf(turn.sampling)], ...notes])));
}

// Sampling parameters as short pairs that wrap.
function pairsOf(values) {
  return values.flatMap(([name, value]) => [el("span", { class: "pair" }, `${visible(name)} `, el("b", {}, visible(value))), " "]);
}

function branchChip(path, turn) {
  const text = `↳ ${visible(turn.branch.why)}`;
  if (turn.branch.turn === null) return chip(text, "branch");
  const button = el("button", { type: "button", class: "chip branch", title: "Go to the turn where it left" }, text);
  button.addEventListener("click", () => button.dispatchEvent(new CustomEvent("goto", { bubbles: true, detail: turn.branch.turn })));
  return button;
}
