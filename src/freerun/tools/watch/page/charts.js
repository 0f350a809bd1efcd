"use strict";
// The charts that compare the ticked runs. A run has the same colour in all charts, and a metric has its own line style.

const STATE_COLORS = {
  "busy": "#2e9e6b", "waiting-for-slot": "#e0872b", "waiting-for-weights": "#4b82e0",
  "waiting-for-data": "#9aa7bb", "waiting-for-others": "#a566c9", "restarting": "#d8394f",
  "parked": "#e3e6eb",
};
const WAITS = {
  workers_waiting_for_slot_share: "waiting for slot", workers_waiting_for_weights_share: "waiting for weights",
  workers_waiting_for_others_share: "waiting for others", workers_restarting_share: "restarting",
};
// Metrics that are not losses, by their names; all others are drawn in the chart of losses.
const NOT_LOSSES = /(_share|_per_second|_percent|_seconds|^lag_|^step$|^update$|^episodes$|^progress$|_mean$|^eval_return$|^adapt|^dropped_steps$|^worker_restarts$|\/)/;
// Metric, label, lower and upper end of the target, line style.
const LOADS = [["queue_percent", "queue", 50, 80, "solid"], ["buffer_percent", "buffer", 70, 90, "dash"], ["cpu_percent", "CPU", 80, 100, "dot"], ["gpu_percent", "GPU", 90, 100, "dashdot"]];
// More runs than this in a legend would leave no room for the curves. The list of runs shows their colours too.
const MOST_IN_LEGEND = 6;
const CONFIG = { displayModeBar: false, responsive: true };

function layout(xTitle, yTitle, extra = {}) {
  const axis = (text) => ({ title: { text, font: { size: 11 }, standoff: 6 }, gridcolor: color("line"), zerolinecolor: color("line"), automargin: true, tickfont: { size: 11 } });
  return {
    margin: { l: 44, r: 12, t: 6, b: 38 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("soft"), size: 12 }, hovermode: "x unified", showlegend: true, uirevision: "keep",
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    ...extra,
    xaxis: { ...axis(xTitle), ...(extra.xaxis || {}) }, yaxis: { ...axis(yTitle), rangemode: "tozero", ...(extra.yaxis || {}) },
  };
}

// Draws a chart, or one sentence in its place if there is no point to draw.
function draw(id, traces, look, missing, config = CONFIG) {
  const chart = element(id), hasPoints = traces.some((trace) => trace.y.some((value) => value !== null));
  chart.hidden = !hasPoints;
  let sentence = chart.parentElement.querySelector(".missing");
  if (!sentence) chart.after(sentence = makeElement("p", { className: "missing" }));
  sentence.hidden = hasPoints;
  sentence.textContent = missing;
  if (hasPoints) return Plotly.react(chart, traces, look, config);
}

function haveEnded(ids = page.selected) {
  return ids.every((id) => page.runs.find((run) => run.id === id)?.outcome !== "running");
}

// One sentence that says why there is nothing to see, and when there will be. `later` and `never` are for runs that have made updates.
function missing(what, { later = "they come with the next update", never = "none was recorded", ids = page.selected } = {}) {
  const over = haveEnded(ids), whose = ids.length > 1 ? "these runs" : "this run";
  if (!ids.some((id) => page.curves[id]?.num_updates)) {
    return over ? `There are no ${what}: ${whose} ended before the first update.` : `There are no ${what} yet: they come when the first update ends.`;
  }
  return over ? `There are no ${what} in ${whose}: ${never}.` : `There are no ${what} yet: ${later}.`;
}

// ------------------------------------------------------------------------------------------------- curves

async function refreshCurves(id) {
  const have = page.curves[id]?.num_updates;
  const answer = await fetchJson("api/curves", have === undefined ? { id } : { id, have });
  if (answer.columns) page.curves[id] = answer;
  return Boolean(answer.columns);
}

// One metric of one run. The legend names it once, for the run that is shown; the list of runs has the colours of the others.
function lineOfRun(id, name, label, style = {}, format = ".4~g") {
  const columns = page.curves[id]?.columns;
  if (!columns || !columns[name]) return [];
  const x = columns[element("x-axis").value] || columns.step;
  const mode = x.length < 3 ? "lines+markers" : "lines";
  const whose = page.selected.length > 1 ? `${id} ` : "";
  return [{
    type: "scatter", mode, x, y: columns[name], name: label, showlegend: id === page.shown, connectgaps: true,
    line: { width: 2, color: colorOf(id), ...style }, hovertemplate: `${whose}${label} %{y:${format}}<extra></extra>`,
  }];
}

function linesOfTickedRuns(name, label, style = {}, format = undefined) {
  return page.selected.flatMap((id) => lineOfRun(id, name, label, style, format));
}

function drawCurves() {
  const x = element("x-axis").selectedOptions[0].textContent, several = page.selected.length > 1;
  const noRates = missing("rates"), noShares = missing("shares of time");
  drawReturns(x, several);
  draw("chart-steps", linesOfTickedRuns("steps_per_second", "steps/s"), layout(x, "steps per second", { showlegend: false }), noRates);
  draw("chart-rates", [...linesOfTickedRuns("episodes_per_second", "episodes/s"), ...linesOfTickedRuns("updates_per_second", "updates/s", { dash: "dot" })], layout(x, "per second"), noRates);
  const waits = Object.entries(WAITS).flatMap(([name, what]) =>
    lineOfRun(page.shown, name, what, { width: 1.5, dash: "dash", color: STATE_COLORS[what.replaceAll(" ", "-")] }, ".0%"));
  const shares = [...linesOfTickedRuns("workers_busy_share", "workers busy", {}, ".0%"), ...linesOfTickedRuns("learner_updating_share", "learner updating", { dash: "dot" }, ".0%"), ...waits];
  draw("chart-shares", shares, layout(x, "share of time", { yaxis: { range: [0, 1.02], tickformat: ".0%" } }), noShares);
  drawLoad(x);
  drawLosses(x);
}

function drawReturns(x, several) {
  const returns = page.selected.flatMap((id) => lineOfRun(id, "return_mean", "return").map((trace) => ({ ...trace, name: several ? id : "return", showlegend: several })));
  const trials = linesOfTickedRuns("eval_return", "trials", { dash: "dot" }).map((trace) => ({ ...trace, mode: "lines+markers" }));
  const showlegend = (several && page.selected.length <= MOST_IN_LEGEND) || (!several && trials.length > 0);
  draw("chart-return", [...returns, ...trials], layout(x, "return of an episode", { showlegend, yaxis: { rangemode: "normal" } }),
    missing("returns", { later: "they come when the first episode ends", never: "no episode has ended" }));
}

function drawLoad(x) {
  const known = LOADS.filter(([name]) => linesOfTickedRuns(name, "").length);
  const bands = known.map(([, , low, high]) => ({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: low, y1: high, fillcolor: color("band"), line: { width: 0 }, layer: "below" }));
  const traces = known.flatMap(([name, label, , , dash]) => linesOfTickedRuns(name, label, { dash }, ".0f"));
  draw("chart-load", traces, layout(x, "percent full or used", { shapes: bands, yaxis: { range: [0, 102], ticksuffix: " %" } }),
    missing("measurements of load", { later: "they come with one of the next updates" }));
}

function drawLosses(x) {
  const columns = page.curves[page.shown]?.columns || {};
  const losses = Object.keys(columns).filter((name) => !NOT_LOSSES.test(name));
  const isVisible = (name) => name.endsWith("loss") || losses.length < 4 ? true : "legendonly";
  const traces = losses.flatMap((name, place) => lineOfRun(page.shown, name, name, { width: 1.5, color: COLORS[place % COLORS.length] })
    .map((trace) => ({ ...trace, visible: isVisible(name) })));
  // There are many losses: their legend stands beside the plot if there is room, and above it on a phone.
  const isWide = element("chart-losses").parentElement.clientWidth > 380;
  const legend = isWide ? { x: 1.02, y: 1, font: { size: 11 } } : { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } };
  draw("chart-losses", traces, layout(x, "value at an update", { legend, yaxis: { rangemode: "normal" } }),
    missing("losses", { ids: [page.shown] }));
}

function drawLags(lags) {
  const total = lags.reduce((sum, [, steps]) => sum + steps, 0) || 1;
  const trace = { type: "bar", x: lags.map(([lag]) => lag), y: lags.map(([, steps]) => 100 * steps / total), marker: { color: colorOf(page.shown) }, hovertemplate: "lag %{x}: %{y:.1f} % of steps<extra></extra>" };
  const look = layout("lag in updates", "share of steps", { showlegend: false, hovermode: "closest", xaxis: { dtick: lags.length < 15 ? 1 : undefined }, yaxis: { ticksuffix: " %" } });
  draw("chart-lag", [trace], look, missing("ages of steps", { ids: [page.shown] }));
}
