// Colour modes. A token's class names its step; the stylesheet colours the steps in both themes.

const LOGPROB_EDGES = [0.99, 0.9, 0.5, 0.2, 0.05, 0.01]; // probabilities, descending
const ENTROPY_EDGES = [0.01, 0.1, 0.5, 1, 1.5, 2]; // nats
const DIFFERENCE_EDGES = [1e-5, 1e-4, 1e-3, 1e-2, 5e-2, 1e-1]; // nats
const VERSION_COLOURS = 6;

function risingStep(value, edges) {
  if (Number.isNaN(value)) return "none";
  const step = edges.findIndex((edge) => value < edge);
  return `s${step < 0 ? edges.length : step}`;
}
function fallingStep(value, edges) {
  if (Number.isNaN(value)) return "none";
  const step = edges.findIndex((edge) => value >= edge);
  return `s${step < 0 ? edges.length : step}`;
}
const edgeText = (edge) => (edge < 0.01 ? edge.toExponential() : `${edge}`);
const rising = (edges) => [`< ${edgeText(edges[0])}`, ...edges.map((edge) => `≥ ${edgeText(edge)}`)];
const falling = (edges) => [...edges.map((edge) => `p ≥ ${edge}`), `p < ${edges.at(-1)}`];
const steps = (labels) => labels.map((label, at) => [`s${at}`, label]);

const MODES = {
  provenance: {
    label: "Provenance",
    about: "Where each token came from.",
    offered: () => true,
    step: (path, token) => `p${path.kind[token]}`,
    legend: (path) => PROVENANCE.map((name, kind) => [`p${kind}`, name]).filter((_, kind) => path.kind.includes(kind)),
  },
  logprob: {
    label: "Logprob",
    about: "How likely the engine found each token that it sampled: the probability, with the semantics of the turn's engine record.",
    offered: () => true,
    step: (path, token) => fallingStep(Math.exp(path.logprob[token]), LOGPROB_EDGES),
    legend: () => [...steps(falling(LOGPROB_EDGES)), ["none", "not sampled"]],
  },
  entropy: {
    label: "Entropy",
    about: "The least entropy in nats that the recorded top k allows.",
    missing: "No turn of this path recorded top_logprobs.",
    offered: (path) => path.has("entropy"),
    step: (path, token) => risingStep(path.entropy[token], ENTROPY_EDGES),
    legend: () => [...steps(rising(ENTROPY_EDGES)), ["none", "no top k"]],
  },
  difference: {
    label: "Re-scored",
    about: "|recorded − re-scored| in nats: how far the engine's own teacher-forced score is from what was recorded.",
    missing: "Nothing was re-scored: give tito view a --base-url.",
    offered: (path) => path.has("difference"),
    step: (path, token) => risingStep(path.difference[token], DIFFERENCE_EDGES),
    legend: () => [...steps(rising(DIFFERENCE_EDGES)), ["none", "not compared"]],
  },
  version: {
    label: "Weights",
    about: "Which weights sampled each token.",
    missing: "No engine said which weights sampled.",
    offered: (path) => path.versions.some((name) => name !== "unknown"),
    step: (path, token) => (path.version[token] < 0 ? "none" : `v${path.version[token] % VERSION_COLOURS}`),
    legend: (path) => [...path.versions.map((name, at) => [`v${at % VERSION_COLOURS}`, visible(name)]), ["none", "not sampled"]],
  },
  trained: {
    label: "Trained here",
    about: "The loss mask of this trajectory: 1 on sampled tokens that no earlier trajectory trains. Constrained tokens are trained only with train_constrained.",
    offered: () => true,
    step: (path, token) => (path.trained[token] ? "t1" : path.kind[token] >= SAMPLED ? "t2" : "none"),
    legend: () => [["t1", "trained here"], ["t2", "sampled, trained elsewhere or not at all"], ["none", "context"]],
  },
};

function modeBar(path, mode, choose) {
  const inputs = Object.entries(MODES).map(([name, { label, about, missing, offered }]) => {
    const isOffered = offered(path);
    return el("label", { title: isOffered ? about : missing, class: isOffered ? "" : "off" },
      el("input", { type: "radio", name: "mode", value: name, checked: name === mode, disabled: !isOffered, onchange: () => choose(name) }),
      el("span", {}, label));
  });
  return el("fieldset", { class: "modes" }, el("legend", { class: "hidden" }, "Colour tokens by"), inputs);
}

function legend(path, mode) {
  const marks = [["call ok", "tool call"], ["call bad", "malformed or cut-off call"], ["call suspect", "text like a call"], ["drift", "would re-tokenize differently"], ["stop", "stop token"]];
  return el("div", { class: "legend", "data-mode": mode },
    el("ul", { "aria-label": `Legend: ${MODES[mode].label}` },
      MODES[mode].legend(path).map(([step, label]) => el("li", {}, el("span", { class: `swatch t ${step}`, "aria-hidden": "true" }, "ab"), label))),
    el("ul", { "aria-label": "Marks", class: "marks" },
      marks.map(([kind, label]) => el("li", {}, el("span", { class: `swatch t ${kind}`, "aria-hidden": "true" }, "ab"), label))));
}
