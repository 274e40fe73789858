// Start the view that the page's data names.

const data = JSON.parse(document.getElementById("data").textContent);
const VIEWS = { rollout: (given) => new RolloutPage(given), compare: (given) => new ComparePage(given), collection: (given) => new CollectionPage(given) };
const main = document.getElementById("page");
document.title = visible(`${data.title} · tito view`);
main.replaceChildren(...VIEWS[data.view](data).element);
main.dataset.ready = String(Math.round(performance.now())); // milliseconds since navigation started
