// The tokens of a path, turn by turn, in chunks. A chunk is plain text, which is fast to search and lay out. Near the
// viewport each of its tokens becomes an element.

const CHUNK_TOKENS = 160; // after this many tokens a chunk ends at the next line break
const CHUNK_LIMIT = 800; // longest chunk
const NEAR = "600px";

class TokenView {
  constructor(path, { mode, from = 0, to = path.length, onselect, heading }) {
    Object.assign(this, { path, mode, from, to, onselect, heading });
    this.current = -1;
    this.chunks = [];
    this.element = el("div", { class: "tokens", id: heading ? null : "tokens", tabindex: "0", role: "group", "data-mode": mode,
      "aria-label": heading ?? "Tokens. Arrow keys move from token to token, J and K from prompt to completion to prompt, N to the next mark." });
    this.observer = new IntersectionObserver((entries) => entries.forEach((entry) => this.show(entry.target.chunk, entry.isIntersecting)), { rootMargin: NEAR });
    this.parts = path.turns.flatMap((turn, place) => [path.starts[place], path.starts[place] + turn.prompt]).filter((start) => from <= start && start < to);
    this.sections = path.turns.map((turn, place) => this.section(turn, place));
    this.element.append(...this.sections.filter(Boolean));
    this.element.addEventListener("pointerover", (event) => this.point(event, false));
    this.element.addEventListener("click", (event) => this.point(event, true));
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.element.addEventListener("focus", () => this.current < 0 && this.select(this.from, { scroll: false }));
  }

  section(turn, place) {
    const start = this.path.starts[place], middle = start + turn.prompt, stop = middle + turn.output;
    if (start >= this.to || (stop <= this.from && start < this.from)) return null;
    const section = el("section", { class: "turn", "aria-label": `Turn ${turn.index}` }, turnHeading(this.path, place));
    const runs = [["delta", "Prompt tokens that the turn adds", start, middle], ["output", "Completion", middle, stop]];
    for (const [name, label, first, last] of runs) {
      const from = Math.max(first, this.from), to = Math.min(last, this.to);
      if (from >= to) continue;
      const run = el("div", { class: `run ${name}`, role: "group", "aria-label": label });
      this.fill(run, turn, from, to, middle);
      section.append(run);
    }
    return section;
  }

  fill(run, turn, first, last, middle) {
    const calls = first >= middle ? turn.calls : [];
    const edges = new Map(); // token -> heading: chunks must begin there
    for (const call of calls) {
      if (middle + call.start >= first) edges.set(middle + call.start, [...(edges.get(middle + call.start) ?? []), callLabel(call)]);
      if (!edges.has(middle + call.stop)) edges.set(middle + call.stop, []);
    }
    if (first < middle) {
      for (const [start, length, digest] of turn.media) edges.set(middle - turn.prompt + start, [mediaLabel(this.path.rollout, length, digest)]);
    }
    for (let at = first; at < last;) {
      run.append(...(edges.get(at) ?? []));
      const stop = this.chunkEnd(at, last, edges);
      run.append(this.chunk(at, stop));
      at = stop;
    }
  }

  chunkEnd(start, last, edges) {
    for (let at = start + 1; at < last; at++) {
      if (edges.has(at)) return at;
      const size = at - start;
      if (size >= CHUNK_LIMIT) return at;
      if (size >= CHUNK_TOKENS && String(this.path.rollout.piece(this.path.id[at - 1])).endsWith("\n")) return at;
    }
    return last;
  }

  chunk(start, stop) {
    const element = el("div", { class: "chunk" }, this.path.labels(start, stop).join(""));
    const chunk = { start, stop, element, isShown: false };
    element.chunk = chunk;
    this.chunks.push(chunk);
    this.observer.observe(element);
    return element;
  }

  show(chunk, isNear) {
    const holdsCurrent = chunk.start <= this.current && this.current < chunk.stop;
    if (chunk.isShown === isNear || (!isNear && holdsCurrent)) return;
    chunk.isShown = isNear;
    const labels = this.path.labels(chunk.start, chunk.stop);
    if (!isNear) return chunk.element.replaceChildren(labels.join(""));
    const tokens = labels.map((label, at) => {
      const token = document.createElement("span");
      token.className = this.className(chunk.start + at);
      token.append(...label.split(/(↵)/).map((part) => (part === "↵" ? el("i", {}, part) : part)));
      return token;
    });
    chunk.element.replaceChildren(...tokens);
  }

  className(token) {
    const { path } = this;
    const call = path.callAt(token);
    const marks = [call && `call ${callKind(call)}`, path.driftAt(token) && "drift", path.isStop(token) && "stop",
      path.kind[token] === INSERTED && "inserted", token === this.current && "current"];
    return `t ${MODES[this.mode].step(path, token)} ${marks.filter(Boolean).join(" ")}`;
  }

  recolour(mode) {
    this.mode = this.element.dataset.mode = mode;
    for (const chunk of this.chunks) {
      if (chunk.isShown) [...chunk.element.children].forEach((token, at) => { token.className = this.className(chunk.start + at); });
    }
  }

  chunkOf(token) {
    return this.chunks.find((chunk) => chunk.start <= token && token < chunk.stop) ?? null;
  }

  elementOf(token) {
    const chunk = token < 0 ? null : this.chunkOf(token);
    return chunk?.isShown ? chunk.element.children[token - chunk.start] : null;
  }

  select(token, { scroll = true, quietly = false } = {}) {
    if (token < this.from || token >= this.to) return;
    const before = this.elementOf(this.current);
    this.current = token;
    if (before) before.classList.remove("current");
    const chunk = this.chunkOf(token);
    if (chunk) this.show(chunk, true);
    const element = this.elementOf(token);
    element?.classList.add("current");
    if (scroll) element?.scrollIntoView({ block: "center" });
    this.onselect?.(token, quietly);
  }

  point(event, isChosen) {
    const chunk = event.target.closest?.(".chunk")?.chunk;
    if (!chunk?.isShown || event.target === chunk.element) return;
    const token = chunk.start + [...chunk.element.children].indexOf(event.target.closest(".t"));
    if (isChosen) this.select(token, { scroll: false });
    else if (!this.isPinned) this.onselect?.(token, true);
    this.isPinned = isChosen ? true : this.isPinned;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || ![this.element, document.body].includes(event.target)) return;
    const here = Math.max(this.current, this.from);
    const moves = {
      ArrowRight: () => here + 1,
      ArrowLeft: () => here - 1,
      j: () => this.parts.find((start) => start > here) ?? here,
      k: () => this.parts.findLast((start) => start < here) ?? here,
      n: () => this.nextMark(here, 1),
      p: () => this.nextMark(here, -1),
      Home: () => this.from,
      End: () => this.to - 1,
      Escape: () => { this.isPinned = false; return here; },
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    this.element.focus({ preventScroll: true });
    if (event.key !== "Escape") this.isPinned = true;
    this.select(move());
  }

  isMarked(token) {
    const call = this.path.callAt(token);
    return Boolean((call && callKind(call) !== "ok") || this.path.driftAt(token) || this.path.kind[token] === INSERTED || this.path.mediaAt(token));
  }

  // The next token that starts a marked run: a bad call, text like a call, drift, an inserted closer or an image.
  nextMark(from, by) {
    for (let at = from + by; at >= this.from && at < this.to; at += by) {
      if (this.isMarked(at) && (at === this.from || !this.isMarked(at - 1))) return at;
    }
    return from;
  }
}

// Keys that are pressed before anything has focus go to the tokens; Home and End still scroll the page.
function takeKeys(shown) {
  addEventListener("keydown", (event) => { if (event.target === document.body && !["Home", "End"].includes(event.key)) shown()?.key(event); });
}

function callLabel(call) {
  const kind = callKind(call);
  return el("p", { class: `note ${kind}` }, el("b", {}, { ok: "✓ call ", bad: "✗ call ", suspect: "? text like a call " }[kind]),
    el("code", {}, visible(call.name ?? "unknown tool")), ` ${visible(call.status)}`, call.reason ? `: ${visible(call.reason)}` : "");
}

function mediaLabel(rollout, length, digest) {
  const url = rollout.data.pictures[digest];
  return el("figure", { class: "note media" },
    url && /^data:image\/(png|jpeg|gif|webp);base64,/.test(url) ? el("img", { src: url, alt: "Picture of the prompt", loading: "lazy" }) : null,
    el("figcaption", {}, `▦ picture, ${count(length, "token")}, sha256 ${digest.slice(0, 12)}…`));
}
