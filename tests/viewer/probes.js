// Functions that the tests call in a page, in addition to the page's own script.

const textOf = (root) => [...root.querySelectorAll(".chunk")].map((chunk) => chunk.textContent).join("");
const facts = () => Object.fromEntries([...document.querySelectorAll(".detail dt")].map((name) => [name.textContent, name.nextSibling.textContent]));
const turns = () => [...document.querySelectorAll("section.turn")].map((turn) => turn.getAttribute("aria-label")).join();
const cells = (column) => [...document.querySelectorAll(".rollouts tbody tr")].map((row) => row.cells[column].textContent);
const headings = () => [...document.querySelectorAll(".rollouts th")].map((heading) => heading.textContent);
const likeliestIds = () => [...document.querySelectorAll(".likeliest tbody tr")].map((row) => row.cells[1].textContent);
const barCounts = (chart) => [...chart.querySelectorAll("title")].map((title) => Number(title.textContent.split(": ").at(-1)));

// How the first element of a selector looks, apart from its place.
function lookOf(selector) {
  const style = getComputedStyle(document.querySelector(selector));
  const names = ["textDecoration", "borderTop", "borderBottom", "borderLeft", "borderRight", "outline", "boxShadow", "backgroundColor", "backgroundImage"];
  return Object.fromEntries(names.map((name) => [name, style[name]]));
}

function search(text) {
  const field = document.querySelector("input[type=search]");
  field.value = text;
  field.dispatchEvent(new Event("input"));
}

// What content has brought about, after everything was opened and clicked.
function brought() {
  return {
    hit: window.hit ?? null,
    links: [...document.querySelectorAll("a")].filter((link) => !link.href.startsWith(location.origin) && !link.hash).length,
    made: document.querySelectorAll("main :is(script, style, link, iframe, object, embed, form, base, meta, img)").length,
    shown: document.body.textContent.includes("<script>window.hit=1</script>"),
    display: getComputedStyle(document.querySelector("main")).display,
  };
}

function clickEverything() {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  document.querySelectorAll("main :is(button, .t, summary, input)").forEach((one) => { if (one.isConnected) one.click(); });
}

// What content would do, were it markup.
function attempt() {
  const attempts = [
    ["button", { onclick: "window.hit = 1" }],
    ["script", { src: "data:text/javascript,window.hit=2" }],
    ["link", { rel: "stylesheet", href: "http://attack.invalid/a.css" }],
    ["img", { src: "http://attack.invalid/a.png" }],
    ["iframe", { src: "http://attack.invalid/" }],
    ["form", { action: "http://attack.invalid/" }],
  ];
  for (const [name, attributes] of attempts) {
    const made = document.createElement(name);
    try {
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    } catch (error) {
      if (error.name !== "TypeError") throw error; // trusted types refuse it
    }
    document.body.append(made);
    made.click();
    made.submit?.();
  }
  const style = document.createElement("style");
  style.textContent = "main { display: none }";
  document.body.append(style);
}

function refusesMarkup(text) {
  try {
    document.body.innerHTML = text;
    return null;
  } catch (error) {
    return error.name;
  }
}

// Milliseconds between frames while the page scrolls for two and a half seconds, shortest first.
function frameGaps() {
  return new Promise((done) => {
    const gaps = [];
    let last = performance.now();
    const end = last + 2500;
    const step = (now) => {
      gaps.push(now - last);
      last = now;
      scrollBy(0, 400);
      if (now < end) requestAnimationFrame(step); else done(gaps.sort((a, b) => a - b));
    };
    requestAnimationFrame(step);
  });
}

// Texts whose contrast is below 4.5 to 1 (WCAG 2.2, AA).
function faint() {
  const luminance = (colour) => {
    const parts = colour.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
    return element.parentElement ? ground(element.parentElement) : "rgb(255, 255, 255)";
  };
  const found = [...document.querySelectorAll(".swatch, .chip, .hint, .size, dt, dd, a, button, summary, .note")].map((element) => {
    const [light, dark] = [luminance(getComputedStyle(element).color), luminance(ground(element))].sort((a, b) => b - a);
    return [element.className, element.textContent.slice(0, 30), (light + 0.05) / (dark + 0.05)];
  });
  return found.filter(([, , ratio]) => ratio < 4.5);
}
