"use strict";
// The trials of the sweep that the shown run belongs to, the best first. A click on a trial shows its first run.

function drawSweep(sweep, id) {
  element("sweep-box").hidden = !sweep;
  if (!sweep) return;
  const folder = id.slice(0, id.lastIndexOf("/") + 1);
  const best = (trial) => trial.state === "complete" ? trial.score : -Infinity;
  const trials = [...sweep.trials].sort((one, other) => best(other) - best(one) || one.number - other.number);
  replaceContent("sweep", [trials, id], () => [sweepHead(sweep.vary), ...trials.map((trial) => trialRow(trial, sweep.vary, folder, id))]);
}

function sweepHead(names) {
  const titles = ["trial", "state", "score", "seconds", ...names.map((name) => name.replaceAll("_", "-"))];
  return makeElement("tr", {}, ...titles.map((title) => makeElement("th", { textContent: title })));
}

function trialRow(trial, names, folder, id) {
  const runs = (trial.runs || []).map((run) => folder + run);
  const button = makeElement("button", { type: "button", className: runs.includes(id) ? "on" : "", textContent: `${trial.number}` });
  button.addEventListener("click", () => { if (!page.runs.some((run) => run.id === runs[0])) return; choose([runs[0]], true); show(runs[0]); });
  const state = trial.state + (trial.on_front ? ", on the front" : "");
  const values = names.map((name) => trial.parameters?.[name]).map((value) => typeof value === "number" ? number(value) : value ?? "–");
  const cells = [state, number(trial.score), number(trial.seconds), ...values].map((text) => makeElement("td", { textContent: text }));
  return makeElement("tr", { title: trial.reason || "" }, makeElement("td", {}, button), ...cells);
}
