// The page of a trace: its widgets, views and sections.
const store = createStore(), source = createSource();
const served = document.getElementById("served") ? createServed(source, store) : null;
const widgets = { tracks: mountTracks, explorer: mountExplorer };

async function drawWidget(root) {
  const { view } = root.closest(".view").dataset, mount = widgets[root.dataset.widget];
  if (served) return served.mount(root, view, mount, themeColors);
  return mount(root, await source.load(view), store, themeColors);
}

const drawVisible = startPage((element) => (element.dataset.widget ? drawWidget(element) : drawFigure(element)));

function selectView() {
  const views = [...document.querySelectorAll(".view")];
  const current = views.find((view) => view.dataset.view === store.get().view) ?? views[0];
  for (const part of document.querySelectorAll(".view-head, .view")) part.hidden = part.dataset.view !== current?.dataset.view;
  const choice = document.getElementById("view");
  if (choice && current) choice.value = current.dataset.view;
  drawVisible();
}
const scrollToSection = () => document.getElementById(store.get().section ?? "")?.scrollIntoView();

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("nav a");
  if (!link) return;
  event.preventDefault();
  store.set({ section: link.hash.slice(1) }, { push: true });
});
// Instants and ranges of one view mean nothing in another.
document.getElementById("view")?.addEventListener("change", (event) => store.set(
  { view: event.target.value, from: null, to: null, at: null, block: null, step: null, module: null, section: null }, { push: true }));
store.subscribe((state, changed) => {
  if (changed.includes("view")) selectView();
  if (changed.includes("section")) scrollToSection();
});
selectView();
scrollToSection();
