"use strict";
// All elements are made here. Attributes never hold content of a rollout, and content is inserted as text only.

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const count = (number, one, several = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : several}`;
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
const short = (number) => (Number.isInteger(number) ? number.toLocaleString("en") : Number(number.toPrecision(4)).toString());
const chip = (text, kind = "") => el("span", { class: `chip ${kind}` }, text);

// A part that is folded in a narrow window, and always open in others.
const narrow = matchMedia("(max-width: 50rem)");
function folding(title, ...content) {
  const part = el("details", { class: "folding", open: !narrow.matches }, el("summary", {}, title), content);
  narrow.addEventListener("change", () => { part.open = !narrow.matches; });
  return part;
}

function listOf(facts) {
  return el("dl", { class: "facts" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// Control and bidirectional characters are replaced by visible ones.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
function visible(text) {
  return text.replace(CONTROL, (found) => {
    const code = found.charCodeAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return code === 127 ? "\u2421" : `⟪${code.toString(16).padStart(4, "0")}⟫`;
  });
}

// How a call is shown: one that runs, text that only looks like a call, or a call that is damaged or cut off.
function callKind(call) {
  if (call.status === "suspect") return "suspect";
  return call.status === "ok" || call.status === "lenient" ? "ok" : "bad";
}

const kept = {
  get(name) {
    try { return localStorage.getItem(`tito-${name}`); } catch { return null; } // no storage in a notebook's frame
  },
  set(name, value) {
    try { localStorage.setItem(`tito-${name}`, value); } catch { /* it lasts as long as the page */ }
  },
};

// The theme chosen by the reader, else the system's.
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
function applyTheme(choice) {
  document.documentElement.dataset.theme = choice === "auto" ? (systemIsDark.matches ? "dark" : "light") : choice;
  document.dispatchEvent(new Event("recolour"));
}

function topBar(...middle) {
  let choice = kept.get("theme") ?? "auto";
  const button = el("button", { type: "button", class: "plain" }, THEMES[choice]);
  button.addEventListener("click", () => {
    const order = Object.keys(THEMES);
    choice = order[(order.indexOf(choice) + 1) % order.length];
    kept.set("theme", choice);
    button.textContent = THEMES[choice];
    applyTheme(choice);
  });
  systemIsDark.addEventListener("change", () => applyTheme(choice));
  applyTheme(choice);
  return el("header", { class: "top" },
    el("a", { class: "skip", href: "#tokens" }, "Skip to the content"),
    el("span", { class: "brand" }, "tito view"), ...middle, el("span", { class: "grow" }), button);
}
