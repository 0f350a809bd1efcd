"use strict";
// The list of runs: a filter, groups of runs that differ only in their seed, and a tick for each run and each group.

const FEW_RUNS = 10;  // with at most this many runs, all groups are open at first

async function refreshRuns() {
  const { runs, selected } = await fetchJson("api/runs");
  const isFirstLook = !page.runs.length;
  page.runs = runs;
  if (isFirstLook && runs.length) {
    const first = runs.find((run) => run.id === selected) ?? runs[0];
    page.firstGroup = first.group;
    setSelected([first.id]);
  }
  setSelected(page.selected.filter((id) => runs.some((run) => run.id === id)));
  drawRuns();
}

// Sets which runs are ticked. Each gets the first colour that no other ticked run has.
function setSelected(ids) {
  page.selected = ids;
  if (!ids.includes(page.shown)) page.shown = ids[0] ?? null;
  for (const id of Object.keys(page.colors)) if (!ids.includes(id)) delete page.colors[id];
  for (const id of ids) {
    const taken = Object.values(page.colors);
    page.colors[id] ??= COLORS.findIndex((_, place) => !taken.includes(place));
  }
}

// ------------------------------------------------------------------------------------------------- what is listed

function describeRun(run) {
  const facts = [run.env, run.algo, `${run.mode} × ${run.num_workers}`];
  const settings = run.settings.slice(0, 3);
  return [...facts, ...settings, ...(run.settings.length > settings.length ? ["…"] : [])].join(" · ");
}

function matches(run, words) {
  const text = `${run.id} ${describeRun(run)} seed ${run.seed} ${run.outcome}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function groupsOf(runs) {
  const groups = new Map();
  for (const run of runs) groups.set(run.group, [...(groups.get(run.group) || []), run]);
  return [...groups.values()];
}

// The common beginning of the names of a group's runs, up to a separator; the environment if there is none.
function commonName(runs) {
  let prefix = runs[0].id;
  for (const { id } of runs) while (!id.startsWith(prefix)) prefix = prefix.slice(0, -1);
  prefix = prefix.replace(/[^-_./ ]*$/, "").replace(/[-_./ ]+$/, "");
  return prefix ? `${prefix}…` : `${runs[0].env}`;
}

function drawRuns() {
  const words = element("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = page.runs.filter((run) => matches(run, words));
  const groups = groupsOf(found);
  element("num-runs").textContent = words.length ? `${found.length} of ${page.runs.length}` : page.runs.length;
  element("runs-hint").textContent = hint(found);
  const open = groups.map(([run]) => isOpen(run.group, words));
  // The list is built anew, so the element that had the keyboard focus gets it back by its key.
  const focused = element("runs").contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const looks = found.map((run) => [run.id, run.group, describeRun(run), run.seed, run.outcome, age(run.began)]);
  replaceContent("runs", [looks, open, page.selected], () => groups.map((runs, place) => groupItem(runs, open[place])));
  if (focused) element("runs").querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function hint(found) {
  if (page.refused) return `At most ${MOST_SELECTED} runs are drawn at once: untick some to see others.`;
  if (!page.runs.length) return "There is no run in this folder yet. A run appears here as soon as freerun train has started it.";
  return found.length ? "" : "No run matches the filter.";
}

function isOpen(group, words) {
  return page.open?.[group] ?? (words.length > 0 || page.runs.length <= FEW_RUNS || group === page.firstGroup);
}

function groupItem(runs, open) {
  if (runs.length === 1) return runItem(runs[0], `${describeRun(runs[0])} · seed ${runs[0].seed} · ${runs[0].outcome}`);
  const [newest] = runs, ids = runs.map((run) => run.id), key = `group ${newest.group}`;
  const num = ids.filter((id) => page.selected.includes(id)).length;
  const box = makeElement("input", { type: "checkbox", checked: num === ids.length, indeterminate: num > 0 && num < ids.length, title: "Tick all of these seeds" });
  box.addEventListener("change", () => choose(ids, box.checked));
  const numRunning = runs.filter((run) => run.outcome === "running").length;
  const state = numRunning ? `${numRunning} running` : "";
  const title = makeElement("span", { textContent: `${commonName(runs)} ` }, makeElement("span", { className: "badge", textContent: `${runs.length} seeds` }));
  const name = makeElement("span", { className: "name" }, title, makeElement("small", { textContent: [describeRun(newest), state].filter(Boolean).join(" · ") }));
  const arrow = makeElement("span", { className: "arrow", textContent: open ? "▾" : "▸" });
  const toggle = makeElement("button", { type: "button", className: "toggle", ariaExpanded: String(open) }, arrow, name);
  toggle.addEventListener("click", () => { page.open = { ...page.open, [newest.group]: !open }; drawRuns(); });
  box.dataset.key = key;
  toggle.dataset.key = `toggle ${key}`;
  const head = makeElement("div", { className: "row" }, box, toggle, startTime(newest));
  const list = makeElement("ul", { hidden: !open }, ...runs.map((run) => runItem(run, `seed ${run.seed} · ${run.outcome}`)));
  return makeElement("li", { className: "group" }, head, list);
}

function runItem(run, text) {
  const box = makeElement("input", { type: "checkbox", checked: page.selected.includes(run.id) });
  box.dataset.key = `run ${run.id}`;
  box.addEventListener("change", () => choose([run.id], box.checked));
  const name = makeElement("span", { className: "name" }, makeElement("span", { textContent: run.id }), makeElement("small", { textContent: text }));
  return makeElement("li", { className: "run" }, makeElement("label", { className: "row" }, box, swatch(run.id), name, startTime(run)));
}

function startTime(run) {
  return makeElement("time", { textContent: age(run.began), title: `begun ${new Date(1000 * run.began).toLocaleString()}` });
}

// ------------------------------------------------------------------------------------------------- ticks

// Ticks or unticks runs, at most MOST_SELECTED in all.
function choose(ids, isChosen) {
  const others = page.selected.filter((id) => !ids.includes(id));
  const wanted = isChosen ? [...page.selected, ...ids.filter((id) => !page.selected.includes(id))] : others;
  page.refused = wanted.length > MOST_SELECTED;
  setSelected(wanted.slice(0, MOST_SELECTED));
  page.drawnContent = {};
  page.zoom = null;
  drawRuns();  // at once: a tick that was refused must vanish too
  refresh();
}

// Shows another of the ticked runs in detail.
function show(id) {
  page.shown = id;
  page.drawnContent = {};
  page.zoom = null;
  refresh();
}

// Says which of several ticked runs is shown: as buttons in the headline, as a choice at the timeline and the losses, as text elsewhere.
function drawShownRun() {
  const several = page.selected.length > 1;
  replaceContent("shown-runs", [page.selected, page.shown, several], () => several ? page.selected.map((id) => {
    const button = makeElement("button", { type: "button", className: id === page.shown ? "on" : "", ariaPressed: String(id === page.shown) }, swatch(id), id);
    button.addEventListener("click", () => show(id));
    return button;
  }) : []);
  const content = JSON.stringify([page.selected, page.shown]);
  if (page.drawnContent.ofRun === content) return;
  page.drawnContent.ofRun = content;
  for (const place of document.querySelectorAll(".of-run")) place.replaceChildren(...(several ? shownRunLabel(place) : []));
}

function shownRunLabel(place) {
  if (!place.classList.contains("choice")) return [`of ${page.shown}`];
  const options = page.selected.map((id) => makeElement("option", { value: id, textContent: id, selected: id === page.shown }));
  const select = makeElement("select", { ariaLabel: "Run that is shown" }, ...options);
  select.addEventListener("change", () => show(select.value));
  return ["of ", swatch(page.shown), select];
}
