// The whole path as one band of pixel columns: an overview, and a scroll bar.

class Ribbon {
  constructor(path, mode, go) {
    Object.assign(this, { path, mode, at: -1 });
    this.canvas = el("canvas", { class: "ribbon", role: "img", "aria-label": `The path from its first to its last of ${count(path.length, "token")}` });
    this.canvas.addEventListener("click", (event) => {
      const box = this.canvas.getBoundingClientRect();
      go(Math.min(path.length - 1, Math.floor(((event.clientX - box.left) / box.width) * path.length)));
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    document.addEventListener("recolour", () => this.draw());
  }

  recolour(mode) {
    this.mode = mode;
    this.draw();
  }

  mark(token) {
    this.at = token;
    this.draw();
  }

  draw() {
    const { path, canvas } = this;
    const width = (canvas.width = Math.round(canvas.clientWidth * devicePixelRatio));
    const height = (canvas.height = Math.round(canvas.clientHeight * devicePixelRatio));
    const context = canvas.getContext("2d");
    if (!context || !width || !path.length) return;
    const style = getComputedStyle(document.documentElement);
    const colours = new Map();
    const colour = (step) => {
      if (!colours.has(step)) colours.set(step, style.getPropertyValue(`--ribbon-${this.mode}-${step}`).trim() || style.getPropertyValue("--ribbon-none").trim());
      return colours.get(step);
    };
    for (let x = 0; x < width; x++) {
      const start = Math.floor((x / width) * path.length), stop = Math.max(start + 1, Math.floor(((x + 1) / width) * path.length));
      context.fillStyle = colour(this.strongest(start, stop));
      context.fillRect(x, 0, 1, height - 4 * devicePixelRatio);
    }
    context.fillStyle = style.getPropertyValue("--ink").trim();
    for (const start of path.starts) context.fillRect(Math.floor((start / path.length) * width), height - 3 * devicePixelRatio, devicePixelRatio, 3 * devicePixelRatio);
    if (this.at >= 0) context.fillRect(Math.floor((this.at / path.length) * width) - devicePixelRatio, 0, 2 * devicePixelRatio, height);
  }

  // The highest step among the tokens of a pixel, so that rare steps stay visible.
  strongest(start, stop) {
    let found = "none";
    const every = Math.max(1, Math.floor((stop - start) / 64));
    for (let at = start; at < stop; at += every) {
      const step = MODES[this.mode].step(this.path, at);
      if (found === "none" || (step !== "none" && step > found)) found = step;
    }
    return found;
  }
}
