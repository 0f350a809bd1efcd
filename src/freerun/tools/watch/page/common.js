"use strict";
// Shared by all parts of the page: its state, requests to the server, and functions that write numbers and make elements.

// The server keeps 16 runs in memory (MOST_IN_MEMORY in run_list.py) and reads any other run again for each request.
const MOST_SELECTED = 12;
const COLORS = [
  "#2f6fde", "#d9822b", "#1a9a6c", "#b24cc4", "#c23b4e", "#8a7a12",
  "#0f9bb5", "#e0679a", "#6b5bd2", "#7a8b99", "#a0522d", "#5fa82e",
];
const token = new URLSearchParams(location.search).get("token") || "";
const element = (id) => document.getElementById(id);

const page = {
  runs: [],  // all runs that the server has found, the one that began last first
  selected: [],  // ids of the ticked runs, in the order in which they were ticked
  shown: null,  // id of the ticked run that the headline, the timeline, the losses and the tables show
  colors: {},  // index into COLORS by run: a run keeps its colour while it is ticked
  curves: {},  // by run, as the server has sent them
  window: "all",  // seconds of the timeline that are shown, counted from its end
  zoom: null,  // start and stop of the part of the timeline that the user has chosen
  drawnContent: {},  // by element: only an element whose content has changed is drawn again
  isRefreshing: false, refreshAgain: false,
};

// Every request carries the token of the page's own address.
async function fetchJson(path, options = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams({ ...options, token })}`);
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

function theme() { return document.documentElement.dataset.theme; }
function setTheme(name) { document.documentElement.dataset.theme = name; page.drawnContent = {}; }
function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }
function colorOf(id) { return COLORS[page.colors[id]]; }

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

function age(time) {
  const seconds = Date.now() / 1000 - time;
  if (seconds < 60) return "now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return seconds < 30 * 86400 ? `${Math.floor(seconds / 86400)} d` : new Date(1000 * time).toLocaleDateString();
}

function makeElement(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made[name] = value;
  made.append(...children);
  return made;
}

function swatch(id) {
  const made = makeElement("span", { className: "swatch" });
  if (page.selected.includes(id)) made.style.background = colorOf(id);
  return made;
}

// Replaces the children of an element, but only if the content has changed: selected text and open details stay.
function replaceContent(id, content, build) {
  const text = JSON.stringify(content);
  if (page.drawnContent[id] === text) return;
  page.drawnContent[id] = text;
  element(id).replaceChildren(...build(content));
}
