// The table of rollouts: index columns first, ledger columns as the ledgers are read.

const COLUMNS = [
  ["number", "#", (row) => String(row.number)],
  ["task", "task", (row) => visible(row.task ?? "")],
  ["group", "group", (row) => visible(row.group ?? "")],
  ["reward", "reward", (row) => (typeof row.reward === "number" ? short(row.reward) : visible(row.reward ?? ""))],
  ["agents", "agents", (row) => visible(row.agents ?? "")],
  ["turns", "turns", (row) => short(row.turns)],
  ["tokens", "tokens", (row) => short(row.tokens)],
  ["sampled", "sampled", (row) => short(row.sampled)],
  ["malformed", "malformed", (row) => `${row.malformed}`],
  ["logprob", "mean logprob", (row) => row.logprob.toFixed(3)],
  ["drift", "drift", (row) => percent(row.drift)],
  ["termination", "termination", (row) => visible(row.termination ?? "")],
  ["backend", "engine", (row) => visible(row.backend ?? "")],
  ["source", "file", (row) => visible(row.source ?? "")],
];
const WORDS = new Set(["task", "group", "agents", "termination", "backend", "source"]);
const PAGE_ROWS = 100;

class CollectionPage {
  constructor(data) {
    this.data = data;
    this.rows = data.rows.map((values) => Object.fromEntries(data.columns.map((name, at) => [name, values[at]])));
    Object.assign(this, { order: "number", isFalling: false, query: "", shown: PAGE_ROWS, chosen: new Set(), isWhole: false });
    this.search = el("input", { type: "search", placeholder: "Task, group, termination, engine, ledger…", "aria-label": "Search rollouts" });
    this.search.addEventListener("input", () => { this.query = this.search.value.toLowerCase(); this.shown = PAGE_ROWS; this.draw(); });
    this.status = el("p", { class: "hint", role: "status" });
    this.compare = el("span", {});
    [this.charts, this.groups, this.table] = ["charts", "", "scroll"].map((name) => el("div", { class: name }));
    this.end = el("div", { class: "end" });
    new IntersectionObserver(([entry]) => { if (entry.isIntersecting && this.shown < this.found.length) { this.shown += PAGE_ROWS; this.drawTable(); } }, { rootMargin: "800px" }).observe(this.end);
    this.element = [topBar(), el("div", { class: "head" }, el("h1", {}, visible(data.title)), this.status), this.charts, this.groups,
      el("div", { class: "tools table-tools", id: "tokens" }, this.search, this.compare), this.table, this.end];
    this.draw();
    this.read();
  }

  draw() {
    this.found = this.rows.filter((row) => !this.query || this.textOf(row).includes(this.query));
    const sign = this.isFalling ? -1 : 1, name = this.order;
    const isEmpty = (value) => value === null || value === undefined;
    this.found.sort((a, b) => isEmpty(a[name]) - isEmpty(b[name]) || sign * (typeof a[name] === "number" && typeof b[name] === "number" ? a[name] - b[name] : String(a[name]).localeCompare(String(b[name]), "en", { numeric: true })) || a.number - b.number);
    this.drawCharts();
    this.drawTable();
  }

  textOf(row) {
    row.text ??= [row.task, row.group, row.termination, row.backend, row.source, row.ledger].join("\n").toLowerCase();
    return row.text;
  }

  drawCharts() {
    const of = (name) => this.found.map((row) => row[name]);
    this.charts.replaceChildren(...[histogram("Reward", of("reward")), histogram("Sampled tokens", of("sampled")), histogram("Mean logprob", of("logprob"), " nats"),
      histogram("Turns that drift", of("drift").map((share) => (typeof share === "number" ? 100 * share : null)), "%")].filter(Boolean));
    this.groups.replaceChildren(...[groupTable(this.found.filter((row) => row.isRead), this.isWhole, () => { this.isWhole = !this.isWhole; this.drawCharts(); })].filter(Boolean));
    const unread = this.rows.filter((row) => !row.isRead).length;
    this.status.textContent = `${this.found.length.toLocaleString("en")} of ${count(this.rows.length, "rollout")}${unread ? `; reading ${unread.toLocaleString("en")} ledgers` : ""}`;
  }

  drawTable() {
    const columns = COLUMNS.filter(([name]) => this.rows.some((row) => row[name] !== null && row[name] !== undefined));
    const head = columns.map(([name, label]) => {
      const isOrder = name === this.order;
      const button = el("button", { type: "button", "data-key": name }, label, el("span", { "aria-hidden": "true" }, isOrder ? (this.isFalling ? " ↓" : " ↑") : ""));
      button.addEventListener("click", () => this.sort(name));
      return el("th", { scope: "col", class: WORDS.has(name) ? "" : "number", "aria-sort": isOrder ? (this.isFalling ? "descending" : "ascending") : null }, button);
    });
    const body = this.found.slice(0, this.shown).map((row) => this.line(row, columns));
    const focused = document.activeElement?.closest?.(".rollouts") ? document.activeElement.dataset.key : null;
    this.table.replaceChildren(el("table", { class: "rollouts" }, el("caption", { class: "hidden" }, "Rollouts"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "hidden" }, "Compare")), head)), el("tbody", {}, body)));
    if (focused) this.table.querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
  }

  line(row, columns) {
    const tick = el("input", { type: "checkbox", "aria-label": `Compare rollout ${row.number}`, "data-key": `tick-${row.number}`, checked: this.chosen.has(row.number) });
    tick.addEventListener("change", () => this.choose(row.number, tick));
    const cells = columns.map(([name, , show]) => {
      const isKnown = row[name] !== null && row[name] !== undefined;
      const text = isKnown ? show(row) : row.isRead ? "" : "…";
      const content = name === "number" ? el("a", { href: `${this.data.home}rollout/${row.number}`, "data-key": `link-${row.number}` }, text) : text;
      const isBad = (name === "malformed" && row.malformed > 0) || (name === "drift" && row.drift > 0);
      return el("td", { class: `${WORDS.has(name) ? "" : "number"} ${isBad ? "flagged" : ""}` }, content);
    });
    return el("tr", {}, el("td", {}, tick), cells);
  }

  sort(name) {
    this.isFalling = name === this.order ? !this.isFalling : !WORDS.has(name) && name !== "number";
    this.order = name;
    this.draw();
  }

  choose(number, tick) {
    if (tick.checked) this.chosen.add(number); else this.chosen.delete(number);
    const [left, right] = this.chosen;
    const hint = this.chosen.size === 1 ? "Tick one more rollout to compare" : this.chosen.size > 2 ? "Tick only two rollouts to compare" : "";
    this.compare.replaceChildren(this.chosen.size === 2 ? el("a", { class: "button", href: `${this.data.home}compare/${left}/${right}` }, `Compare ${left} and ${right}`) : hint);
  }

  // Fetch the remaining rows in steps; the server limits the time of each step.
  async read() {
    let from = 0, drawn = performance.now();
    while (from < this.rows.length) {
      const answer = await fetch(`${this.data.home}facts/${from}`);
      if (!answer.ok) { this.status.textContent = `Reading stopped at rollout ${from + 1}: ${answer.status}`; return; }
      const { columns, rows } = await answer.json();
      if (!rows.length) break;
      rows.forEach((values, at) => {
        const row = this.rows[from + at];
        columns.forEach((name, column) => { row[name] = values[column]; });
        row.isRead = true;
        delete row.text;
      });
      from += rows.length;
      if (performance.now() - drawn > 1500 || from >= this.rows.length) { this.draw(); drawn = performance.now(); }
    }
  }
}
