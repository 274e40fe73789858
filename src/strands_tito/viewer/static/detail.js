const HINT = "Point at a token, or use the arrow keys, or J, K and N. A click keeps a token here until Escape.";

// The details of one token: id, bytes, numbers, and the alternatives that the engine reported.

function detailOf(path, token) {
  const { turn, inTurn, inOutput } = path.locate(token);
  const facts = [
    ["token", `${path.id[token]}`],
    ["bytes", bytesText(path.rollout.piece(path.id[token]))],
    ["provenance", `${PROVENANCE[path.kind[token]]}: ${MEANING[PROVENANCE[path.kind[token]]]}`],
    ["place", `${token.toLocaleString("en")} of ${path.length.toLocaleString("en")} in the path`],
    ["turn", `${turn.index}, ${inOutput < 0 ? `prompt token ${inTurn}` : `output token ${inOutput}`}`],
    ...numbers(path, token),
  ];
  const call = path.callAt(token), drift = path.driftAt(token);
  if (call) facts.push(["tool call", `${visible(call.name ?? "unknown tool")}, ${visible(call.status)}${call.reason ? `: ${visible(call.reason)}` : ""}`]);
  if (path.isStop(token)) facts.push(["stop", "ended the answer"]);
  if (drift) facts.push(["drift", `re-tokenizing gives ${drift[2].map((id) => `${id} ${quoted(path, id)}`).join(", ") || "nothing"}`]);
  return [el("h2", { class: "piece" }, path.labels(token, token + 1)[0]), listOf(facts), likeliest(path, turn, token, inTurn)];
}

function numbers(path, token) {
  const facts = [];
  const add = (name, value, text) => Number.isNaN(value) || facts.push([name, text]);
  const logprob = path.logprob[token];
  add("logprob", logprob, `${short(logprob)} nats, p ${short(Math.exp(logprob))}`);
  add("prompt logprob", path.promptLogprob[token], `${short(path.promptLogprob[token])} nats, raw`);
  add("entropy", path.entropy[token], `at least ${short(path.entropy[token])} nats`);
  add("re-scored", path.difference[token], path.difference[token] ? `differs by ${path.difference[token].toExponential(1)} nats` : "exactly the same");
  if (path.version[token] >= 0) facts.push(["weights", visible(path.versions[path.version[token]])]);
  facts.push(["loss mask", path.trained[token] ? "1: trained here" : "0"]);
  return facts;
}

function likeliest(path, turn, token, inTurn) {
  const top = turn.top;
  const row = top ? inTurn - top.start : -1;
  if (!top || row < 0) return null;
  turn.topIds ??= integers(top.ids);
  turn.topLogprobs ??= floats(top.logprobs);
  const rows = [];
  for (let at = row * top.k; at < Math.min((row + 1) * top.k, turn.topIds.length); at++) {
    const id = turn.topIds[at], chance = Math.exp(turn.topLogprobs[at]);
    if (id < 0) continue;
    const bar = el("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${Math.max(1, 100 * chance)}%`;
    rows.push(el("tr", { class: id === path.id[token] ? "chosen" : "" }, el("td", {}, el("code", {}, quoted(path, id))),
      el("td", { class: "number" }, `${id}`), el("td", { class: "number" }, short(turn.topLogprobs[at])), el("td", { class: "chance" }, bar, percent(chance))));
  }
  if (!rows.length) return null;
  const head = el("tr", {}, ["token", "id", "logprob", "p"].map((name) => el("th", { scope: "col" }, name)));
  return el("table", { class: "likeliest" }, el("caption", {}, `Likeliest ${rows.length}`), el("thead", {}, head), el("tbody", {}, rows));
}

const quoted = (path, id) => `“${path.rollout.shown(id).replaceAll("\n", "")}”`;

function bytesText(piece) {
  if (piece === null) return "unknown: no tokenizer";
  if (piece === "") return "unknown: the tokenizer has no such id";
  const hex = Array.isArray(piece) ? piece[0] : [...new TextEncoder().encode(piece)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.match(/../g).join(" ");
}

function spoken(path, token) {
  const logprob = path.logprob[token];
  const call = path.callAt(token);
  return [`${path.labels(token, token + 1)[0]},`, PROVENANCE[path.kind[token]], Number.isNaN(logprob) ? "" : `probability ${short(Math.exp(logprob))}`,
    call && call.status !== "ok" ? `in a ${call.status} call` : "", `token ${token}, turn ${path.locate(token).turn.index}`].join(" ");
}
