// Two rollouts side by side, from the first token in which they differ.

class ComparePage {
  constructor(data) {
    this.rollouts = data.sides.map((side) => new Rollout(side));
    this.leaves = this.rollouts.map((rollout) => rollout.leaves[0]);
    this.mode = kept.get("mode") ?? "provenance";
    [this.bar, this.key] = ["bar-slot", "key-slot"].map((name) => el("div", { class: name }));
    this.body = el("div", { class: "comparison" });
    this.detail = el("aside", { class: "detail wide", "aria-label": "Token" }, el("p", { class: "hint" }, HINT));
    this.status = el("p", { class: "hidden", role: "status" });
    this.element = [topBar(...(data.served ? [el("nav", { class: "crumbs", "aria-label": "Rollouts" }, el("a", { href: data.home }, "All rollouts"))] : [])),
      el("div", { class: "head" }, el("h1", {}, visible(data.title)), this.facts(data)),
      el("div", { class: "tools" }, this.bar, folding("Legend", this.key)), this.body, this.status];
    this.show();
    takeKeys(() => this.views.find((view) => view.element.checkVisibility()));
  }

  // The facts of both rollouts: first those that differ, then, folded, the equal ones.
  facts(data) {
    const of = (rollout) => new Map([
      ...rollout.data.notes.filter((note) => note.turn === null).map((note) => [note.name, note.value]),
      ...rollout.data.facts.filter(([name]) => ["task", "group", "tokenizer"].includes(name)),
      ...(rollout.data.turns[0]?.record ?? []).filter(([name]) => ["backend", "model", "logprobs"].includes(name)),
      ...(rollout.data.turns[0]?.sampling ?? []).map(([name, value]) => [`sampling ${name}`, value]),
      ["turns", String(rollout.turns.size)], ["sampled", String(rollout.count((turn) => turn.output))]]);
    const [left, right] = this.rollouts.map(of);
    const rows = [...new Set([...left.keys(), ...right.keys()])].map((name) => {
      const values = [left, right].map((side) => visible(side.get(name) ?? "not recorded"));
      return [values[0] === values[1], el("tr", {}, el("th", { scope: "row" }, visible(name)), values.map((value) => el("td", {}, value)))];
    });
    const those = (isSame) => rows.filter(([same]) => same === isSame).map(([, row]) => row);
    const names = data.sides.map((side) => el("th", { scope: "col" }, data.served ? el("a", { href: `${data.home}rollout/${side.number}` }, visible(side.title)) : visible(side.title)));
    return [folding("What differs", el("div", { class: "scroll" }, el("table", { class: "sides" }, el("thead", {}, el("tr", {}, el("td", {}), names)), el("tbody", { class: "differs" }, those(false))))),
      el("details", {}, el("summary", {}, count(those(true).length, "fact is the same", "facts are the same")), el("div", { class: "scroll" }, el("table", { class: "sides" }, el("tbody", {}, those(true)))))];
  }

  show() {
    const paths = this.rollouts.map((rollout, side) => new Path(rollout, this.leaves[side]));
    if (paths.some((path) => !path.length)) return this.body.replaceChildren(el("p", { class: "hint" }, "One of the two holds no token."));
    this.paths = paths;
    if (!paths.every((path) => MODES[this.mode]?.offered(path))) this.mode = "provenance";
    const common = commonPrefix(...paths);
    const describe = (path) => (token, quietly) => {
      this.detail.replaceChildren(...detailOf(path, token).filter(Boolean));
      if (!quietly) this.status.textContent = spoken(path, token);
    };
    const shared = new TokenView(paths[0], { mode: this.mode, to: common, onselect: describe(paths[0]), heading: "Tokens that both have" });
    this.views = [shared];
    const sides = paths.map((path, side) => {
      const heading = `${["Left", "Right"][side]}, from token ${common.toLocaleString("en")}`;
      const view = new TokenView(path, { mode: this.mode, from: common, onselect: describe(path), heading });
      this.views.push(view);
      const rest = common === path.length ? el("p", { class: "hint" }, "It ends here.") : view.element;
      return el("section", { class: "side", "aria-label": heading }, el("h2", {}, heading), this.leafChoice(side), rest);
    });
    const prefix = el("details", { class: "shared", open: common === paths[0].length || common === paths[1].length }, el("summary", {}, sharedText(paths, common)), shared.element);
    this.body.replaceChildren(prefix, el("div", { class: "two", id: "tokens" }, sides), this.detail);
    this.bar.replaceChildren(modeBar(modePath(paths), this.mode, (name) => this.recolour(name)));
    this.recolour(this.mode);
  }

  leafChoice(side) {
    const rollout = this.rollouts[side];
    if (rollout.leaves.length < 2) return null;
    const choice = el("select", {}, rollout.leaves.map((leaf, at) => el("option", { value: leaf, selected: leaf === this.leaves[side] }, `trajectory ${at + 1} of ${rollout.leaves.length}, to turn ${leaf}`)));
    choice.addEventListener("change", () => { this.leaves[side] = Number(choice.value); this.show(); });
    return el("label", { class: "leaf" }, "Path ", choice);
  }

  recolour(mode) {
    this.mode = mode;
    kept.set("mode", mode);
    this.views.forEach((view) => view.recolour(mode));
    this.key.replaceChildren(legend(modePath(this.paths), mode));
  }
}

function commonPrefix(left, right) {
  const most = Math.min(left.length, right.length);
  let at = 0;
  while (at < most && left.id[at] === right.id[at]) at++;
  return at;
}

function sharedText([left, right], common) {
  let sampled = 0, farthest = 0;
  for (let at = 0; at < common; at++) {
    if (left.kind[at] < SAMPLED || right.kind[at] < SAMPLED) continue;
    sampled += 1;
    farthest = Math.max(farthest, Math.abs(left.logprob[at] - right.logprob[at]));
  }
  const apart = sampled ? `; ${count(sampled, "of them was", "of them were")} sampled by both, with logprobs at most ${farthest.toExponential(1)} nats apart` : "";
  return `The first ${count(common, "token is", "tokens are")} the same${apart}`;
}

// The part of a path's interface that the colour modes need, over two paths.
function modePath(paths) {
  return {
    kind: Uint8Array.from(new Set(paths.flatMap((path) => [...new Set(path.kind)]))),
    versions: paths[0].versions.length > paths[1].versions.length ? paths[0].versions : paths[1].versions,
    has: (column) => paths.every((path) => path.has(column)),
  };
}
