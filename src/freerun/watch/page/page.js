"use strict";
// Asks for what is new once a second and draws it. All it knows comes from run folders, so it may be opened at any time.

const POLL_MS = 1000;
const MOST_SELECTED = 6;
const COLORS = ["#2f6fde", "#d9822b", "#1a9a6c", "#b24cc4", "#c23b4e", "#8a7a12"];
const STATE_COLORS = {
  "busy": "#2e9e6b", "waiting-for-slot": "#e0872b", "waiting-for-weights": "#4b82e0",
  "waiting-for-data": "#9aa7bb", "waiting-for-others": "#a566c9", "restarting": "#d8394f",
  "parked": "#e3e6eb",
};
const WAITS = {
  workers_waiting_for_slot_share: "waiting for slot", workers_waiting_for_weights_share: "waiting for weights",
  workers_waiting_for_others_share: "waiting for others", workers_restarting_share: "restarting",
};
const NOT_LOSSES = /(_share|_per_second|_percent|_seconds|^lag_|^step$|^update$|^episodes$|^progress$|_mean$|^eval_return$|^adapt|^dropped_steps$|^worker_restarts$|\/)/;
const token = new URLSearchParams(location.search).get("token") || "";
const element = (id) => document.getElementById(id);

const page = { runs: [], selected: [], curves: {}, window: "all", zoom: null, drawn: {}, lastTimeline: 0, isLooking: false };

async function ask(path, options = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams({ ...options, token })}`);
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

// ------------------------------------------------------------------------------------------------- looks

function theme() { return document.documentElement.dataset.theme; }
function setTheme(name) { document.documentElement.dataset.theme = name; page.drawn = {}; }
function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

function layout(extra = {}) {
  const axis = { gridcolor: color("line"), zerolinecolor: color("line"), automargin: true, tickfont: { size: 11 } };
  return {
    margin: { l: 44, r: 12, t: 6, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("soft"), size: 12 }, hovermode: "x unified", showlegend: true, uirevision: "keep",
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    ...extra,
    xaxis: { ...axis, ...(extra.xaxis || {}) }, yaxis: { ...axis, rangemode: "tozero", ...(extra.yaxis || {}) },
  };
}
const CONFIG = { displayModeBar: false, responsive: true };

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 100 ? value.toFixed(0) : value.toPrecision(digits);
}

function clock(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds), rest = String(whole % 60).padStart(2, "0");
  const minutes = Math.floor(whole / 60) % 60, hours = Math.floor(whole / 3600);
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made[name] = value;
  made.append(...children);
  return made;
}

// Only what has changed is put into the page: a selection or an open stack stays as it is.
function fill(id, content, build) {
  const text = JSON.stringify(content);
  if (page.drawn[id] === text) return;
  page.drawn[id] = text;
  element(id).replaceChildren(...build(content));
}

// ------------------------------------------------------------------------------------------------- runs

async function lookForRuns() {
  const { runs, selected } = await ask("api/runs");
  page.runs = runs;
  if (!page.selected.length && runs.length) {
    page.selected = [runs.find((run) => run.id === selected)?.id ?? runs[0].id];
  }
  page.selected = page.selected.filter((id) => runs.some((run) => run.id === id));
  fill("runs", [runs, page.selected], () => runs.map(runItem));
}

function runItem(run) {
  const place = page.selected.indexOf(run.id);
  const box = make("input", { type: "checkbox", checked: place >= 0 });
  box.addEventListener("change", () => choose(run.id, box.checked));
  const swatch = make("span", { className: "swatch" });
  if (place >= 0) swatch.style.background = COLORS[place];
  const about = `${run.env} · ${run.algo} · ${run.mode} × ${run.num_workers} · seed ${run.seed} · ${run.outcome}`;
  const label = make("label", {}, box, swatch, make("span", { textContent: run.id }), make("small", { textContent: about }));
  return make("li", {}, label);
}

function choose(id, isChosen) {
  page.selected = page.selected.filter((other) => other !== id);
  if (isChosen) page.selected = [...page.selected, id].slice(-MOST_SELECTED);
  page.drawn = {};
  page.zoom = null;
  look();
}

// ------------------------------------------------------------------------------------------------- the first run

function drawOverview(run, id) {
  element("title").textContent = id;
  const facts = [`${run.env}`, `${run.algo}`, `${run.mode} × ${run.num_workers}`, `seed ${run.seed}`,
    `${number(run.step)} steps`, `${number(run.episodes)} episodes`, `${number(run.updates)} updates`, clock(run.seconds)];
  element("subtitle").textContent = facts.join(" · ");
  element("progress").style.width = `${100 * (run.progress || 0)}%`;
  const badge = element("connection");
  badge.textContent = run.outcome;
  badge.className = `badge ${run.outcome === "running" ? "running" : run.outcome === "failed" ? "failed" : ""}`;
  element("advice").hidden = !run.advice;
  element("advice").textContent = run.advice || "";
  fill("figures", run.figures.filter((figure) => !figure.percent), (figures) => figures.map((figure) =>
    make("div", { className: "figure" }, make("b", { textContent: number(figure.value) }), make("span", { textContent: figure.label }))));
  fill("gauges", run.figures.filter((figure) => figure.percent), (figures) => figures.map(gauge));
  fill("ledger", Object.entries(run.ledger), (rows) => rows.map(([name, value]) => row(name.replaceAll("_", " "), number(value))));
  fill("config", Object.entries(run.config), (rows) => rows.map(([name, value]) => row(name, JSON.stringify(value))));
  element("num-incidents").textContent = Math.max(run.num_incidents, figureOf(run, "worker_restarts"));
  fill("incidents", run.incidents, (incidents) => incidents.length ? incidents.map(incident) : [make("p", { className: "hint", textContent: "None." })]);
  const log = element("log"), isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  if (log.textContent !== run.log) {
    log.textContent = run.log || "Nothing was logged.";
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
  drawLags(run.lags);
}

function figureOf(run, name) { return run.figures.find((figure) => figure.name === name)?.value ?? 0; }
function row(name, value) { return make("tr", {}, make("td", { textContent: name }), make("td", { textContent: value })); }

function gauge(figure) {
  const isGood = figure.value >= figure.low && figure.value <= figure.high;
  const band = make("div", { className: "band" }), bar = make("div", { className: "fill" });
  band.style.left = `${figure.low}%`;
  band.style.width = `${figure.high - figure.low}%`;
  bar.style.width = `${Math.min(100, figure.value)}%`;
  return make("div", { className: `gauge ${isGood ? "in" : "out"}` },
    make("div", { className: "row" }, make("span", { textContent: figure.label }), make("b", { textContent: `${figure.value.toFixed(0)} %` })),
    make("div", { className: "track" }, bar, band),
    make("div", { className: "row" }, make("span", { textContent: `target ${figure.target}` })));
}

function incident(found) {
  const when = new Date(1000 * found.time).toLocaleTimeString();
  const where = found.worker < 0 ? "learner" : `worker ${found.worker}`;
  const seed = found.seed === null || found.seed === undefined ? "" : ` · seed ${found.seed}`;
  const details = make("details", { className: "incident" }, make("summary", { textContent: `${when} · ${where} · ${found.kind}${seed}` }));
  details.append(make("pre", { textContent: found.text }));
  return details;
}

function drawLags(lags) {
  const total = lags.reduce((sum, [, steps]) => sum + steps, 0) || 1;
  const trace = { type: "bar", x: lags.map(([lag]) => lag), y: lags.map(([, steps]) => 100 * steps / total), marker: { color: COLORS[0] }, hovertemplate: "lag %{x}: %{y:.1f} % of steps<extra></extra>" };
  const look = layout({ showlegend: false, hovermode: "closest", xaxis: { title: { text: "updates", font: { size: 11 } }, dtick: lags.length < 15 ? 1 : undefined }, yaxis: { ticksuffix: " %" } });
  Plotly.react("chart-lag", [trace], look, CONFIG);
}

// ------------------------------------------------------------------------------------------------- curves

async function lookAtCurves(id) {
  const have = page.curves[id]?.num_updates;
  const answer = await ask("api/curves", have === undefined ? { id } : { id, have });
  if (answer.columns) page.curves[id] = answer;
  return Boolean(answer.columns);
}

function line(id, name, label, extra = {}) {
  const columns = page.curves[id]?.columns;
  if (!columns || !columns[name]) return [];
  const x = columns[element("x-axis").value] || columns.step;
  const mode = x.length < 3 ? "lines+markers" : "lines";
  return [{ type: "scatter", mode, x, y: columns[name], name: label, line: { width: 2, color: COLORS[page.selected.indexOf(id)] }, connectgaps: true, ...extra }];
}

function ofEach(name, label = (id) => id, extra = {}) {
  return page.selected.flatMap((id) => line(id, name, label(id), extra));
}

function drawCurves() {
  const several = page.selected.length > 1;
  const named = (what) => (id) => several ? `${id} ${what}` : what;
  const dotted = { line: { width: 1.5, dash: "dot" } };
  const onlyOne = { showlegend: several };
  const dash = (trace, dashed) => ({ ...trace, line: { ...trace.line, dash: dashed } });
  Plotly.react("chart-return", [...ofEach("return_mean"), ...ofEach("eval_return", named("trials")).map((trace) => ({ ...dash(trace, "dot"), mode: "lines+markers" }))], layout({ showlegend: several, yaxis: { rangemode: "normal" } }), CONFIG);
  Plotly.react("chart-steps", ofEach("steps_per_second"), layout(onlyOne), CONFIG);
  Plotly.react("chart-rates", [...ofEach("episodes_per_second", named("episodes/s")), ...ofEach("updates_per_second", named("updates/s")).map((trace) => dash(trace, "dot"))], layout(), CONFIG);
  const percent = { yaxis: { range: [0, 1.02], tickformat: ".0%" } };
  const waits = page.selected.slice(0, 1).flatMap((id) => Object.entries(WAITS).flatMap(([name, what]) =>
    line(id, name, what, { line: { width: 1.5, dash: "dash", color: STATE_COLORS[what.replaceAll(" ", "-")] } })));
  Plotly.react("chart-shares", [...ofEach("workers_busy_share", named("workers busy")), ...ofEach("learner_updating_share", named("learner updating")).map((trace) => dash(trace, "dot")), ...waits], layout(percent), CONFIG);
  drawLoad(named, dash);
  const first = page.selected[0], columns = page.curves[first]?.columns || {};
  const losses = Object.keys(columns).filter((name) => !NOT_LOSSES.test(name));
  Plotly.react("chart-losses", losses.flatMap((name, place) => line(first, name, name, { line: { width: 1.5, color: COLORS[place % COLORS.length] }, visible: name.endsWith("loss") || losses.length < 4 ? true : "legendonly" })), layout({ yaxis: { rangemode: "normal" } }), CONFIG);
}

function drawLoad(named, dash) {
  const figures = [["queue_percent", "queue", 50, 80, "solid"], ["buffer_percent", "buffer", 70, 90, "dash"], ["cpu_percent", "CPU", 80, 100, "dot"], ["gpu_percent", "GPU", 90, 100, "dashdot"]];
  const known = figures.filter(([name]) => ofEach(name).length);
  const bands = known.map(([, , low, high]) => ({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: low, y1: high, fillcolor: color("band"), line: { width: 0 }, layer: "below" }));
  const traces = known.flatMap(([name, label, , , style]) => ofEach(name, named(label)).map((trace) => dash(trace, style)));
  Plotly.react("chart-load", traces, layout({ shapes: bands, yaxis: { range: [0, 102], ticksuffix: " %" } }), CONFIG);
}

// ------------------------------------------------------------------------------------------------- the timeline

async function drawTimeline(id) {
  const box = element("timeline");
  const cells = Math.max(60, Math.min(500, Math.floor(box.clientWidth / 3)));
  const options = { id, cells };
  if (page.zoom) Object.assign(options, { start: page.zoom[0], stop: page.zoom[1] });
  else if (page.window !== "all") {
    const { seconds } = await ask("api/timeline", { id, cells: 1, start: 0, stop: 0.01 });
    options.start = Math.max(0, seconds - Number(page.window));
  }
  const found = await ask("api/timeline", options);
  const order = found.tracks.map((name, track) => [name, track]).sort(([a], [b]) => a.startsWith("worker") - b.startsWith("worker"));
  const width = (found.stop - found.start) / cells;
  const x = Array.from({ length: cells }, (_, cell) => found.start + (cell + 0.5) * width);
  const z = order.map(([, track]) => found.top[track].map((state, cell) => state < 0 ? null : state + 0.05 + 0.9 * Math.max(0, (found.percent[track][cell] - 30) / 70)));
  const text = order.map(([, track]) => found.top[track].map((state, cell) => state < 0 ? "" : `${found.states[state]} ${found.percent[track][cell]} %`));
  const scale = found.states.flatMap((state, place) => {
    const full = STATE_COLORS[state], faint = mixed(full, color("card"), 0.6), size = found.states.length;
    return [[place / size, faint], [(place + 0.999) / size, full]];
  });
  scale[scale.length - 1][0] = 1;
  const trace = { type: "heatmap", x, y: order.map(([name]) => name), z, text, zmin: 0, zmax: found.states.length, colorscale: scale, showscale: false, ygap: order.length > 40 ? 0 : 1, hovertemplate: "%{y}, %{x:.2f} s: %{text}<extra></extra>" };
  box.style.height = `${Math.min(720, 56 + order.length * (order.length > 40 ? 9 : 18))}px`;
  const many = order.length > 40;
  const look = layout({ hovermode: "closest", showlegend: false, uirevision: null, margin: { l: 92, r: 12, t: 6, b: 34 }, xaxis: { range: [found.start, found.stop], ticksuffix: " s", showgrid: false }, yaxis: { autorange: "reversed", rangemode: "normal", fixedrange: true, showgrid: false, automargin: false, nticks: many ? 20 : order.length + 1, tickmode: many ? "auto" : "array", tickvals: many ? undefined : order.map(([name]) => name) } });
  page.isDrawingTimeline = true;
  await Plotly.react(box, [trace], look, { ...CONFIG, doubleClick: false });
  page.isDrawingTimeline = false;
  if (!box.hasListeners) listenToTimeline(box);
  fill("legend", [found.states, theme()], () => found.states.map((state) => {
    const swatch = make("i");
    swatch.style.background = STATE_COLORS[state];
    return make("span", {}, swatch, state);
  }));
}

function listenToTimeline(box) {
  box.hasListeners = true;
  box.on("plotly_relayout", (change) => {
    if (page.isDrawingTimeline || change["xaxis.range[0]"] === undefined) return;
    page.zoom = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    showWindow(null);
    redrawTimeline();
  });
  box.on("plotly_doubleclick", () => { page.zoom = null; page.window = "all"; showWindow("all"); redrawTimeline(); });
}

function showWindow(name) {
  for (const button of document.querySelectorAll("[data-window]")) button.classList.toggle("on", button.dataset.window === name);
}
function redrawTimeline() { if (page.selected.length) drawTimeline(page.selected[0]).catch(lost); }

function mixed(first, second, share) {
  const parts = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const [a, b] = [parts(first), parts(second)];
  return `rgb(${a.map((value, at) => Math.round(value * (1 - share) + b[at] * share)).join(",")})`;
}

// ------------------------------------------------------------------------------------------------- going on

function lost() {
  const badge = element("connection");
  badge.textContent = "no answer; trying again";
  badge.className = "badge lost";
}

async function look() {
  if (page.isLooking) return;
  page.isLooking = true;
  try {
    await lookForRuns();
    if (page.selected.length) {
      const [first] = page.selected;
      const news = await Promise.all(page.selected.map(lookAtCurves));
      drawOverview(await ask("api/run", { id: first }), first);
      const what = [page.selected, element("x-axis").value, theme()].join();
      if (news.some(Boolean) || page.drawn.curves !== what) drawCurves();
      page.drawn.curves = what;
      if (!page.zoom || page.drawn.timeline !== what) await drawTimeline(first);
      page.drawn.timeline = what;
    } else {
      element("connection").textContent = "waiting for a run";
    }
  } catch (problem) {
    lost();
    console.warn(problem);
  } finally {
    page.isLooking = false;
  }
}

for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => { page.window = button.dataset.window; page.zoom = null; showWindow(page.window); redrawTimeline(); });
}
element("x-axis").addEventListener("change", look);
element("theme").addEventListener("click", () => { setTheme(theme() === "dark" ? "light" : "dark"); look(); });
if (matchMedia("(max-width: 900px)").matches) element("runs-box").open = false;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", () => { setTheme(prefersDark.matches ? "dark" : "light"); look(); });
look();
setInterval(() => { if (!document.hidden) look(); }, POLL_MS);
