// The page of one rollout.

class RolloutPage {
  constructor(data) {
    this.data = data;
    this.rollout = new Rollout(data);
    this.mode = kept.get("mode") ?? "provenance";
    this.detail = el("aside", { class: "detail", "aria-label": "Token" }, el("p", { class: "hint" }, HINT));
    this.status = el("p", { class: "hidden", role: "status" });
    this.body = el("div", { class: "rollout" });
    [this.bar, this.key, this.strip] = ["bar-slot", "key-slot", "strip-slot"].map((name) => el("div", { class: name }));
    this.tools = el("div", { class: "tools" }, this.bar, folding("Legend", this.key), this.strip);
    this.element = [topBar(...crumbs(data)), this.head(), this.tools, this.body, this.status];
    this.body.addEventListener("goto", (event) => this.go(event.detail));
    this.show(this.rollout.leaves[0]);
    takeKeys(() => this.view);
    addEventListener("hashchange", () => this.follow());
    this.follow();
  }

  head() {
    const { rollout, data } = this;
    const sampled = rollout.count((turn) => turn.output), all = sampled + rollout.count((turn) => turn.prompt);
    const [bad, suspect] = ["bad", "suspect"].map((kind) => rollout.count((turn) => turn.calls.filter((call) => callKind(call) === kind).length));
    const drifted = rollout.count((turn) => (turn.drift.length ? 1 : 0));
    const notes = data.notes.filter((note) => note.turn === null);
    const reward = rollout.note("reward");
    const findings = [
      reward !== null && el("span", { class: "reward" }, el("small", {}, "reward "), visible(reward)),
      bad > 0 && chip(count(bad, "malformed or cut-off call"), "bad"),
      suspect > 0 && chip(count(suspect, "text like a call", "texts like calls"), "warn"),
      drifted > 0 && chip(`drift in ${count(drifted, "turn")}`, "warn"),
      !data.text && chip("ids only: no tokenizer on this machine", "warn"),
      data.truncated && chip(data.truncated, "warn"),
    ].filter(Boolean);
    const facts = [
      ...notes.filter((note) => note.name !== "reward").map((note) => chip(`${visible(note.name)}: ${visible(note.value)}`)),
      chip(count(rollout.turns.size, "turn")),
      chip(count(rollout.leaves.length, "trajectory", "trajectories")),
      chip(`${count(all, "token")}, ${sampled.toLocaleString("en")} sampled`),
    ];
    return el("div", { class: "head" }, el("h1", {}, visible(data.title)), findings.length ? el("div", { class: "chips" }, findings) : null,
      folding("Facts", el("div", { class: "chips" }, facts)),
      data.broken ? el("p", { class: "note bad", role: "alert" }, visible(data.broken)) : null,
      data.mismatches.map(mismatchOf),
      data.facts.length ? el("details", {}, el("summary", {}, "About this rollout"), listOf(data.facts.map(([name, value]) => [name, visible(value)]))) : null);
  }

  show(leaf) {
    if (leaf === undefined) return this.body.replaceChildren(el("p", { class: "hint" }, "This ledger holds no turn."));
    this.path = new Path(this.rollout, leaf);
    if (!MODES[this.mode]?.offered(this.path)) this.mode = "provenance";
    this.view = new TokenView(this.path, { mode: this.mode, onselect: (token, quietly) => this.describe(token, quietly) });
    this.ribbon = new Ribbon(this.path, this.mode, (token) => this.view.select(token));
    this.tree = branchTree(this.rollout, this.path, (turn) => this.go(turn));
    this.bar.replaceChildren(modeBar(this.path, this.mode, (name) => this.recolour(name)));
    this.strip.replaceChildren(this.ribbon.canvas);
    this.body.replaceChildren(this.tree, this.view.element, this.detail);
    this.recolour(this.mode);
  }

  recolour(mode) {
    this.mode = mode;
    kept.set("mode", mode);
    this.view.recolour(mode);
    this.ribbon.recolour(mode);
    this.key.replaceChildren(legend(this.path, mode));
  }

  describe(token, quietly) {
    this.detail.replaceChildren(...detailOf(this.path, token).filter(Boolean));
    if (quietly) return;
    this.status.textContent = spoken(this.path, token);
    this.ribbon.mark(token);
    const turn = this.path.locate(token).turn.index;
    for (const link of this.tree.querySelectorAll(".turn-link")) {
      if (Number(link.dataset.turn) === turn) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
  }

  // Go to a turn; if this path lacks it, open the first path that holds it.
  go(index) {
    if (!this.rollout.turns.has(index)) return;
    if (!this.path.turns.some((turn) => turn.index === index)) this.show(this.rollout.leafOf.get(index));
    const place = this.path.turns.findIndex((turn) => turn.index === index);
    this.view.sections[place].scrollIntoView({ block: "start" });
    if (this.path.starts[place] < this.path.length) this.view.select(this.path.starts[place], { scroll: false });
    this.view.element.focus({ preventScroll: true });
  }

  follow() {
    const found = /^#turn-(\d+)$/.exec(location.hash);
    if (found) this.go(Number(found[1]));
  }
}

// How far another model is from the one that sampled, in whole, by turn, and by position in the answer.
const MISMATCH = ["tokens", "KL(sampler ‖ other)", "KL(other ‖ sampler)", "effective sample", "ratios outside 0.5 to 2"];
const tiny = (value) => (value === null ? "∞" : value === 0 ? "0" : value < 0.01 ? value.toExponential(1) : short(value));

function mismatchOf({ name, problem, model, leftOut, rows }) {
  const title = `Mismatch with ${visible(name)}`;
  if (problem) return el("p", { class: "note bad", role: "alert" }, `${title}: ${visible(problem)}`);
  const left = leftOut ? [chip(`${count(leftOut, "sampled token")} not comparable`, "warn")] : [];
  if (!rows.length) return el("p", { class: "mismatch" }, `${title} (${visible(model)}) `, left);
  const figures = (row) => [row[2].toLocaleString("en"), tiny(row[3]), tiny(row[4]), `${(100 * row[5]).toFixed(1)}%`, `${(100 * row[6]).toFixed(1)}%`];
  const label = ([kind, key]) => ({ all: "all", turn: `turn ${key}`, position: key < 2 ? `position ${key}` : `positions ${key} to ${2 * key - 1}` })[kind];
  const body = rows.map((row) => el("tr", {}, el("th", { scope: "row" }, label(row)), figures(row).map((text) => el("td", { class: "number" }, text))));
  const [, kl, reverse, size, far] = figures(rows[0]);
  return el("details", { class: "mismatch" }, el("summary", {}, `${title} (${visible(model)}): KL ${kl}, reverse ${reverse} nats a token, effective sample ${size}, ${far} of ratios outside 0.5 to 2 `, left),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("td", {}), MISMATCH.map((text) => el("th", { scope: "col", class: "number" }, text)))), el("tbody", {}, body))));
}

function crumbs(data) {
  if (!data.served) return [];
  const links = [el("a", { href: `${data.home}` }, "All rollouts")];
  if (data.number > 1) links.push(el("a", { href: `${data.home}rollout/${data.number - 1}`, rel: "prev" }, "‹ previous"));
  if (data.number < data.rollouts) links.push(el("a", { href: `${data.home}rollout/${data.number + 1}`, rel: "next" }, "next ›"));
  return [el("nav", { "aria-label": "Rollouts", class: "crumbs" }, links)];
}
