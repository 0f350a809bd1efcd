"use strict";
// Asks the server for news once a second and draws them. All data come from run folders, so the page may be opened at any time.

const POLL_MS = 1000;

// ------------------------------------------------------------------------------------------------- the shown run

function drawOverview(run, id) {
  const several = page.selected.length > 1;
  element("title").textContent = id;
  const facts = [`${run.env}`, `${run.algo}`, `${run.mode} × ${run.num_workers}`, `seed ${run.seed}`,
    `${number(run.step)} steps`, `${number(run.episodes)} episodes`, `${number(run.updates)} updates`, clock(run.seconds)];
  element("subtitle").textContent = facts.join(" · ");
  element("progress").style.width = `${100 * (run.progress || 0)}%`;
  const badge = element("connection");
  badge.textContent = several ? `${id}: ${run.outcome}` : run.outcome;
  badge.className = `badge ${run.outcome === "running" ? "running" : run.outcome === "failed" ? "failed" : ""}`;
  element("advice").hidden = !run.advice;
  element("advice").textContent = run.advice || "";
  const nothing = (what) => [makeElement("p", { className: "hint", textContent: missing(what, { ids: [id] }) })];
  const [shares, values] = [run.figures.filter((figure) => figure.percent), run.figures.filter((figure) => !figure.percent)];
  replaceContent("figures", [values, haveEnded([id])], () => values.length ? values.map((figure) =>
    makeElement("div", { className: "figure" }, makeElement("b", { textContent: number(figure.value) }), makeElement("span", { textContent: figure.label }))) : nothing("figures"));
  replaceContent("gauges", shares, (figures) => figures.map(gauge));
  const counts = Object.entries(run.ledger);
  replaceContent("ledger", [counts, haveEnded([id])], () => counts.length ? counts.map(([name, value]) => row(name.replaceAll("_", " "), number(value))) : nothing("counts"));
  replaceContent("config", Object.entries(run.config), (rows) => rows.map(([name, value]) => row(name, JSON.stringify(value))));
  element("num-incidents").textContent = Math.max(run.num_incidents, figureOf(run, "worker_restarts"));
  replaceContent("incidents", run.incidents, (incidents) => incidents.length ? incidents.map(incident) : [makeElement("p", { className: "hint", textContent: "No worker has been restarted." })]);
  const log = element("log"), isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  if (log.textContent !== run.log) {
    log.textContent = run.log || "Nothing was logged.";
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
  drawSweep(run.sweep, id);
  drawLags(run.lags);
}

function figureOf(run, name) { return run.figures.find((figure) => figure.name === name)?.value ?? 0; }
function row(name, value) { return makeElement("tr", {}, makeElement("td", { textContent: name }), makeElement("td", { textContent: value })); }

function gauge(figure) {
  const isGood = figure.value >= figure.low && figure.value <= figure.high;
  const band = makeElement("div", { className: "band" }), bar = makeElement("div", { className: "fill" });
  band.style.left = `${figure.low}%`;
  band.style.width = `${figure.high - figure.low}%`;
  bar.style.width = `${Math.min(100, figure.value)}%`;
  return makeElement("div", { className: `gauge ${isGood ? "in" : "out"}` },
    makeElement("div", { className: "row" }, makeElement("span", { textContent: figure.label }), makeElement("b", { textContent: `${figure.value.toFixed(0)} %` })),
    makeElement("div", { className: "track" }, bar, band),
    makeElement("div", { className: "row" }, makeElement("span", { textContent: `target ${figure.target}` })));
}

function incident(found) {
  const when = new Date(1000 * found.time).toLocaleTimeString();
  const where = found.worker < 0 ? "learner" : `worker ${found.worker}`;
  const seed = found.seed === null || found.seed === undefined ? "" : ` · seed ${found.seed}`;
  const details = makeElement("details", { className: "incident" }, makeElement("summary", { textContent: `${when} · ${where} · ${found.kind}${seed}` }));
  details.append(makeElement("pre", { textContent: found.text }));
  return details;
}

// Draws the headline alone, which says why there is nothing else.
function drawNothing() {
  const isEmpty = !page.runs.length;
  element("title").textContent = isEmpty ? "No run yet" : "No run is ticked";
  element("subtitle").textContent = isEmpty
    ? "The first run appears here as soon as freerun train has started it."
    : "Tick a run in the list to see it.";
  element("progress").style.width = "0";
  element("advice").hidden = true;
  element("connection").textContent = isEmpty ? "waiting for a run" : "no run is ticked";
  element("connection").className = "badge";
}

// ------------------------------------------------------------------------------------------------- refreshing

function showConnectionLost() {
  const badge = element("connection");
  badge.textContent = "no answer; trying again";
  badge.className = "badge lost";
}

// Runs one refresh at a time. A call during a refresh makes it start again, because it may show what was ticked before.
async function refresh() {
  if (page.isRefreshing) {
    page.refreshAgain = true;
    return;
  }
  page.isRefreshing = true;
  try {
    do {
      page.refreshAgain = false;
      await refreshOnce();
    } while (page.refreshAgain);
  } catch (problem) {
    showConnectionLost();
    console.warn(problem);
  } finally {
    page.isRefreshing = false;
  }
}

async function refreshOnce() {
  await refreshRuns();
  document.body.classList.toggle("nothing", !page.selected.length);
  drawShownRun();
  if (!page.selected.length) {
    drawNothing();
    return;
  }
  const id = page.shown;
  const news = await Promise.all(page.selected.map(refreshCurves));
  const overview = await fetchJson("api/run", { id });
  if (page.refreshAgain) return;  // the user has ticked something else in the meantime
  drawOverview(overview, id);
  // Curves are drawn when there are new points, or when what they show has changed.
  const what = [page.selected, id, haveEnded(), element("x-axis").value, theme()].join();
  if (news.some(Boolean) || page.drawnContent.curves !== what) drawCurves();
  page.drawnContent.curves = what;
  // A part that the user has zoomed into stays as it is.
  if (!page.zoom || page.drawnContent.timeline !== what) await drawTimeline(id);
  page.drawnContent.timeline = what;
}

for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => { page.window = button.dataset.window; page.zoom = null; showWindow(page.window); redrawTimeline(); });
}
element("x-axis").addEventListener("change", refresh);
element("filter").addEventListener("input", drawRuns);
element("theme").addEventListener("click", () => { setTheme(theme() === "dark" ? "light" : "dark"); refresh(); });
if (matchMedia("(max-width: 900px)").matches) element("runs-box").open = false;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", () => { setTheme(prefersDark.matches ? "dark" : "light"); refresh(); });
refresh();
setInterval(() => { if (!document.hidden && !page.isRefreshing) refresh(); }, POLL_MS);
