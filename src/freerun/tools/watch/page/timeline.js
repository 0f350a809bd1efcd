"use strict";
// The timeline of one run: a row for the learner, each of its stages and each worker.

const MANY_ROWS = 40;  // with more rows than this, rows are thin and only some are named
const TALLEST = 720;
const MARGIN = { l: 100, r: 12, t: 6, b: 46 };

async function drawTimeline(id) {
  const box = element("timeline");
  const cells = Math.max(60, Math.min(500, Math.floor(box.parentElement.clientWidth / 3)));
  const options = { id, cells };
  if (page.zoom) Object.assign(options, { start: page.zoom[0], stop: page.zoom[1] });
  else if (page.window !== "all") {
    const { seconds } = await fetchJson("api/timeline", { id, cells: 1, start: 0, stop: 0.01 });
    options.start = Math.max(0, seconds - Number(page.window));
  }
  const found = await fetchJson("api/timeline", options);
  if (id !== page.shown) return;  // the user has chosen another run in the meantime
  const order = found.tracks.map((name, track) => [name, track]).sort(([a], [b]) => a.startsWith("worker") - b.startsWith("worker"));
  const missing = haveEnded([id]) ? "No timeline was recorded in this run." : "There is no timeline yet: it comes when the workers have started.";
  page.isDrawingTimeline = true;  // the event that Plotly sends for this drawing is not a zoom of the user
  await draw("timeline", order.length ? [heatmap(found, order, cells)] : [], timelineLayout(found, order), missing, { ...CONFIG, doubleClick: false });
  page.isDrawingTimeline = false;
  if (box.on && !box.hasListeners) listenToTimeline(box);
  replaceContent("legend", [order.length ? found.states : [], theme()], ([states]) => states.map((state) => {
    const mark = makeElement("i");
    mark.style.background = STATE_COLORS[state];
    return makeElement("span", {}, mark, state);
  }));
}

// Each cell shows its most frequent state. The colour is fainter the smaller the share of that state.
function heatmap(found, order, cells) {
  const width = (found.stop - found.start) / cells;
  const x = Array.from({ length: cells }, (_, cell) => found.start + (cell + 0.5) * width);
  // The whole part of z is the state, the rest its share: 30 % or less is faintest, 100 % has the full colour.
  const z = order.map(([, track]) => found.top[track].map((state, cell) => state < 0 ? null : state + 0.05 + 0.9 * Math.max(0, (found.percent[track][cell] - 30) / 70)));
  const text = order.map(([, track]) => found.top[track].map((state, cell) => state < 0 ? "" : `${found.states[state]} ${found.percent[track][cell]} %`));
  const scale = found.states.flatMap((state, place) => {
    const full = STATE_COLORS[state], faint = mixColors(full, color("card"), 0.6), size = found.states.length;
    return [[place / size, faint], [(place + 0.999) / size, full]];
  });
  scale[scale.length - 1][0] = 1;
  return { type: "heatmap", x, y: order.map(([name]) => name), z, text, zmin: 0, zmax: found.states.length, colorscale: scale, showscale: false, ygap: order.length > MANY_ROWS ? 0 : 1, hovertemplate: "%{y}, %{x:.2f} s: %{text}<extra></extra>" };
}

function timelineLayout(found, order) {
  const many = order.length > MANY_ROWS;
  // Plotly keeps the height of its first drawing unless a layout sets it. Without this, a run with more rows would be
  // drawn over the elements below.
  const height = Math.min(TALLEST, MARGIN.t + MARGIN.b + Math.max(3, order.length) * (many ? 9 : 18));
  const ticks = many ? { nticks: 20 } : { tickmode: "array", tickvals: order.map(([name]) => name) };
  return layout("seconds since the start", "who", {
    height, hovermode: "closest", showlegend: false, uirevision: null, margin: MARGIN,
    xaxis: { range: [found.start, found.stop], ticksuffix: " s", showgrid: false },
    yaxis: { autorange: "reversed", rangemode: "normal", fixedrange: true, showgrid: false, automargin: false, ...ticks },
  });
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
function redrawTimeline() { if (page.shown) drawTimeline(page.shown).catch(showConnectionLost); }

function mixColors(first, second, share) {
  const parts = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const [a, b] = [parts(first), parts(second)];
  return `rgb(${a.map((value, at) => Math.round(value * (1 - share) + b[at] * share)).join(",")})`;
}
