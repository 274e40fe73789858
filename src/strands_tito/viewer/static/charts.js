// Small charts in SVG. Their data is also in their label and in the table.

const BINS = 24;

function histogram(title, values, unit = "") {
  const numbers = values.filter((value) => typeof value === "number" && Number.isFinite(value)).sort((a, b) => a - b);
  if (!numbers.length) return null;
  const [low, high] = [numbers[0], numbers.at(-1)];
  const bins = new Array(BINS).fill(0);
  for (const value of numbers) bins[low === high ? BINS >> 1 : Math.min(BINS - 1, Math.floor(((value - low) / (high - low)) * BINS))]++;
  const most = Math.max(...bins);
  const mean = numbers.reduce((sum, value) => sum + value, 0) / numbers.length;
  const middle = numbers[numbers.length >> 1];
  const summary = `${title}: ${count(numbers.length, "rollout")}, ${short(low)} to ${short(high)}${unit}, median ${short(middle)}, mean ${short(mean)}`;
  const width = 240 / bins.length;
  const bars = bins.map((height, at) => {
    const from = low + ((high - low) * at) / bins.length, to = low + ((high - low) * (at + 1)) / bins.length;
    const tall = height ? Math.max(1.5, (64 * height) / most) : 0;
    return svg("rect", { x: at * width + 0.5, y: 66 - tall, width: Math.max(1, width - 1), height: tall, rx: 1 }, svg("title", {}, `${low === high ? short(low) : `${short(from)} to ${short(to)}`}: ${height}`));
  });
  const axis = svg("line", { x1: 0, y1: 66.5, x2: 240, y2: 66.5 });
  return el("figure", { class: "chart" }, el("figcaption", {}, title, el("span", {}, `mean ${short(mean)}${unit}`)),
    svg("svg", { viewBox: "0 0 240 68", role: "img", "aria-label": summary, preserveAspectRatio: "none" }, ...bars, axis),
    el("p", { class: "ends", "aria-hidden": "true" }, low === high ? el("span", { class: "one" }, `all ${short(low)}${unit}`) : [el("span", {}, `${short(low)}${unit}`), el("span", {}, `${short(high)}${unit}`)]));
}

// Rewards of a group as dots on one line, with their mean.
function strip(values, low, high) {
  const at = (value) => 6 + (high === low ? 0.5 : (value - low) / (high - low)) * 168;
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const dots = [...values].sort((a, b) => a - b).map((value) => svg("circle", { cx: at(value), cy: 9, r: 3.5 }));
  return svg("svg", { viewBox: "0 0 180 18", class: "strip", role: "img", "aria-label": `${short(Math.min(...values))} to ${short(Math.max(...values))}, mean ${short(mean)}` },
    svg("line", { x1: 6, y1: 9, x2: 174, y2: 9 }), ...dots, svg("line", { x1: at(mean), y1: 2, x2: at(mean), y2: 16, class: "mean" }));
}

const SHOWN_GROUPS = 8;

// Rewards by group, of rows that are read: END records do not name the groups. Where all of a group are equal, an advantage within the group is zero.
function groupTable(rows, isWhole, showWhole) {
  const groups = new Map();
  for (const row of rows) {
    if (typeof row.reward !== "number") continue;
    const name = row.group ?? row.task ?? "no group";
    groups.set(name, [...(groups.get(name) ?? []), row.reward]);
  }
  if (![...groups.values()].some((values) => values.length > 1)) return null;
  const every = [...groups].map(([name, values]) => ({ name, values, mean: values.reduce((sum, value) => sum + value, 0) / values.length, isFlat: values.length > 1 && new Set(values).size === 1 }));
  every.sort((a, b) => (a.isFlat || a.values.length === 1) - (b.isFlat || b.values.length === 1) || a.mean - b.mean || a.name.localeCompare(b.name));
  const rewards = rows.map((row) => row.reward).filter((reward) => typeof reward === "number");
  const [low, high] = rewards.reduce(([least, most], reward) => [Math.min(least, reward), Math.max(most, reward)], [Infinity, -Infinity]);
  const flat = every.filter((group) => group.isFlat).length;
  const body = (isWhole ? every : every.slice(0, SHOWN_GROUPS)).map(({ name, values, mean, isFlat }) => el("tr", {}, el("th", { scope: "row" }, visible(name)),
    el("td", { class: "number" }, String(values.length)), el("td", { class: "number" }, short(mean)), el("td", {}, strip(values, low, high)), el("td", {}, isFlat ? chip("all equal") : "")));
  const more = every.length > SHOWN_GROUPS ? el("button", { type: "button", class: "plain", onclick: showWhole }, isWhole ? "Show fewer" : `Show all ${every.length.toLocaleString("en")} groups`) : null;
  return el("section", { class: "groups", "aria-label": "Rewards by group" }, el("h2", {}, "Rewards by group"),
    el("p", { class: "hint" }, `${count(every.length, "group")}, ${flat.toLocaleString("en")} of them with equal rewards throughout, which teach nothing within their group. ${low === high ? `Every reward is ${short(low)}.` : `Axis ${short(low)} to ${short(high)}; the bar is the mean.`}`),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["group", "rollouts", "mean", "rewards"].map((name) => el("th", { scope: "col" }, name)), el("td", {}))), el("tbody", {}, body))), more);
}
