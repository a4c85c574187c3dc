// Puts the page together: what is shown, what the keys and buttons do, and one drawing a frame.

import { Answer } from "./answer.js";
import { ask } from "./ask.js";
import { Balance, BalanceChart } from "./balance.js";
import { forgetTheme } from "./colours.js";
import { Comparison } from "./compare.js";
import { Detail } from "./detail.js";
import { LoadMap } from "./load.js";
import { TokenMap } from "./map.js";
import { Player } from "./player.js";
import { UNFINISHED, line, read } from "./saved.js";
import { ServerError, getJson, useKey } from "./stream.js";
import { MapTable } from "./table.js";
import { TokenText, describe } from "./text.js";
import { watchTheme } from "./theme.js";
import { capital, visible } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const PAGE = 50; // tokens that the page keys go

/** What is shown. `answers` are all there are: {answer, player}. */
const view = {
  answers: [],
  a: null,
  b: null,
  comparison: null,
  balanceA: null,
  balanceB: null,
  token: 0,
  layer: 0,
  expert: null,
  colour: "usual",
  rank: 1,
  byWeight: false, // what the load adds up
  growing: false,
  changed,
};
let info = null; // what the server says of its rows; null without a server
let running = null; // the AbortController of the request under way
let asked = 0;
let isPinned = false; // whether a token was selected by hand while the answer grows

const map = new TokenMap($("map"), view, select);
const load = new LoadMap($("load"), view, select);
const chart = new BalanceChart($("balance"), view, select);
const detail = new Detail($("detail"), select);
const table = new MapTable($("table"), view);
const texts = [new TokenText($("tokens-a"), "a", select), new TokenText($("tokens-b"), "b", select)];

// ---- drawing ----

const REST = 60; // milliseconds between two drawings of all but the map, while an answer grows
let isScheduled = false;
let drawn = 0;

function changed() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(frame);
}

function frame(now) {
  isScheduled = false;
  if (!view.a || !$("views").clientWidth) return; // a page that is not laid out is drawn when it is
  let more = false;
  try {
    for (const { player } of view.answers) if (player && !player.isOver) more = player.step(now) || more;
    if (view.comparison) more = view.comparison.extend() || more;
  } catch (error) {
    showError(error);
  }
  for (const balance of [view.balanceA, view.balanceB]) if (balance) more = balance.extend() || more;
  const wasGrowing = view.growing;
  view.growing = [view.a, view.b].some((answer) => answer && answer.finished === null);
  map.following = !isPinned;
  if ((view.growing || wasGrowing) && !isPinned) view.token = Math.max(view.a.end - 1, 0);
  isPinned ||= !view.growing;
  if (draw(now) || more) changed();
}

/** Draws everything; whether some is left for the next frame. */
function draw(now) {
  const { a, b, comparison, token } = view;
  map.draw();
  write("map-status", cellInWords(map.hover ?? view));
  if (view.growing && now - drawn < REST) return true;
  drawn = now;
  load.draw();
  chart.draw();
  detail.draw(view);
  let more = map.more;
  const firstToken = comparison?.firstToken ?? null;
  [a, b].forEach((answer, i) => {
    if (!answer) return;
    texts[i].draw(token, { isStreaming: answer.finished === null && !isPinned, firstToken });
    more = texts[i].shade(map.rarity(i)) || more;
  });
  write("summary", summary(a, b ? "A: " : "") + (b ? ` ${summary(b, "B: ")}` : ""));
  $("parting").hidden = !b;
  if (b) {
    write("parting-text", comparison.sentence());
    $("go").hidden = !comparison.first;
  }
  write("detail-token", describe(a, token));
  write("load-status", loadInWords());
  write("balance-status", balanceInWords());
  $("stop").disabled = !running && !view.answers.some(({ player }) => player && !player.isOver);
  return more;
}

/** Sets a text, only where it changes: the browser would lay the page out anew. */
function write(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function summary(answer, name) {
  const generated = answer.promptLength === null ? null : answer.tokens.length - answer.promptLength;
  const tokens = generated === null ? `${answer.tokens.length} tokens` : `${answer.promptLength} prompt and ${generated} generated tokens`;
  const missing = answer.missing ? ` (${answer.missing} unknown)` : "";
  const end = answer.finished === null ? "streaming" : answer.finished === UNFINISHED ? UNFINISHED : `finish reason: ${answer.finished}`;
  return `${name}${tokens}, ${answer.length} rows${missing} of ${answer.layers} layers × ${answer.topK} of ${answer.experts} experts, ${end}.`;
}

function cellInWords({ token, layer }) {
  const { a, b, comparison } = view;
  const ids = (answer) => answer.cellInWords(token, layer);
  const words = `${describe(a, token)}; ${a.layerName(layer)}: `;
  if (!b) return `${words}${ids(a)}`;
  const others = comparison.cells[(token - comparison.start) * a.layers + layer];
  const differs = token >= comparison.start && token < comparison.end ? ` (${others} differ)` : "";
  return `${words}A ${ids(a)}; B ${ids(b)}${differs}`;
}

function loadInWords() {
  const { a, layer, expert } = view;
  const loads = Array.from({ length: a.experts }, (_, i) => a.load(layer, i, load.byWeight));
  const most = loads.reduce((best, load, i) => (load > loads[best] ? i : best), 0);
  const place = layer * a.experts;
  const never = a.counts.subarray(place, place + a.experts).filter((count) => !count).length;
  const words = `${capital(a.layerName(layer))}: busiest expert ${most} with ${loads[most].toFixed(1)} × the even share${load.byWeight ? " by weights" : ""}; ${never} of ${a.experts} experts unused.`;
  if (expert === null) return words;
  const weighed = a.hasWeights ? `; by weights ${a.load(layer, expert, true).toFixed(2)} × (sum ${a.sums[place + expert].toFixed(2)})` : "";
  return `${words} Expert ${expert}: ${a.load(layer, expert).toFixed(2)} × (${a.counts[place + expert]} tokens)${weighed}.`;
}

function balanceInWords() {
  const { a, balanceA, balanceB, layer, token } = view;
  const row = Math.min(Math.max(token - a.start, 0), balanceA.length - 1);
  if (row < 0) return "";
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const { low, mean, high } = balanceA.lines;
  const beside = balanceB && row < balanceB.length ? ` B (dotted): ${percent(balanceB.lines.mean[row])}.` : "";
  return `Token ${row + a.start}: mean over layers ${percent(mean[row])} (solid), ${a.layerName(layer)} ${percent(balanceA.at(row, layer))} (dashed), all layers between ${percent(low[row])} and ${percent(high[row])} (band).${beside}`;
}

// ---- what is selected ----

/** Selects a token, a layer, an expert of it: those that are given. */
function select(cell, isSpoken = false) {
  if (!view.a) return;
  if (cell.token !== undefined) isPinned = true;
  if (cell.layer !== undefined && cell.expert === undefined && cell.layer !== view.layer) view.expert = null;
  Object.assign(view, cell);
  const last = Math.max(view.a.tokens.length, view.a.end, view.b?.end ?? 0) - 1;
  view.token = Math.min(Math.max(view.token, 0), Math.max(last, 0));
  view.layer = Math.min(Math.max(view.layer, 0), view.a.layers - 1);
  map.reveal(view.token);
  texts.forEach((text) => text.reveal(view.token));
  table.show(view.token);
  if (isSpoken) say(cellInWords(view));
  changed();
}

let spoken = null;

/** Says it to screen readers, when the keys rest. */
function say(words) {
  clearTimeout(spoken);
  spoken = setTimeout(() => ($("live").textContent = words), 150);
}

const STEPS = {
  ArrowLeft: (at) => ({ token: at.token - 1 }),
  ArrowRight: (at) => ({ token: at.token + 1 }),
  ArrowUp: (at) => ({ layer: at.layer - 1 }),
  ArrowDown: (at) => ({ layer: at.layer + 1 }),
  PageUp: (at) => ({ token: at.token - PAGE }),
  PageDown: (at) => ({ token: at.token + PAGE }),
  Home: () => ({ token: 0 }),
  End: () => ({ token: Infinity }),
};

function onKeys(element, steps) {
  element.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (!step || !view.a || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    select(step(view), true);
  });
}

onKeys($("map"), STEPS);
const { ArrowUp, ArrowDown, ...along } = STEPS;
for (const side of ["tokens-a", "tokens-b"]) onKeys($(side), along);
const expertBy = (by) => (at) => ({ layer: at.layer, expert: at.expert === null ? 0 : Math.min(Math.max(at.expert + by, 0), at.a.experts - 1) });
onKeys($("load"), {
  ArrowLeft: expertBy(-1),
  ArrowRight: expertBy(1),
  ArrowUp: (at) => ({ layer: Math.max(at.layer - 1, 0), expert: at.expert ?? 0 }),
  ArrowDown: (at) => ({ layer: Math.min(at.layer + 1, at.a.layers - 1), expert: at.expert ?? 0 }),
  Escape: (at) => ({ layer: at.layer, expert: null }),
});
$("load").addEventListener("keydown", () => view.a && say(loadInWords()));

// ---- answers ----

function add(entry) {
  view.answers.push(entry);
  for (const pick of [$("pick-a"), $("pick-b")]) pick.add(new Option(entry.answer.name, String(view.answers.length - 1)));
  $("pick-a").options[0].hidden = true;
}

/** Shows answers by their places; `b` can be null. */
function show(a, b) {
  const of = (place) => (place === null ? null : view.answers[place].answer);
  view.comparison = null;
  try {
    if (b !== null) view.comparison = new Comparison(of(a), of(b));
  } catch (error) {
    showError(error);
    b = null;
  }
  Object.assign(view, { a: of(a), b: of(b), expert: null });
  view.layer = Math.min(view.layer, view.a.layers - 1);
  $("pick-a").value = String(a);
  $("pick-b").value = b === null ? "" : String(b);
  texts[0].reset(view.a);
  if (view.b) texts[1].reset(view.b);
  $("side-b").hidden = $("name-a").hidden = !view.b;
  $("name-a").textContent = `A: ${view.a.name}`;
  $("name-b").textContent = `B: ${view.b?.name}`;
  document.body.classList.toggle("two", Boolean(view.b));
  weigh();
  detail.build(view);
  $("rank").max = view.a.topK;
  $("views").hidden = false;
  $("empty").hidden = true;
  $("save").disabled = false;
  $("play").disabled = false;
  recolour();
  table.show(view.token);
}

/** Measures the balance anew. */
function weigh() {
  const span = Number($("window").value);
  view.balanceA = view.a && new Balance(view.a, span);
  view.balanceB = view.b && new Balance(view.b, span);
  changed();
}

function recolour() {
  forgetTheme();
  map.reset();
  if (view.a) {
    map.legend($("legend"), $("legend-text"), $("legend-b"));
    load.legend($("load-legend"), $("load-legend-text"), $("by-label"));
    chart.forget();
  }
  changed();
}

const chosen = (pick) => (pick.value === "" ? null : Number(pick.value));

function pick() {
  if (chosen($("pick-a")) !== null) show(chosen($("pick-a")), chosen($("pick-b")));
}

/** Shows the answers in the texts of files: [{name, text}]. */
function open(files, given) {
  const whole = [];
  let about = {};
  for (const { name, text } of files) {
    const found = read(text, name, about, given);
    about = found.about;
    whole.push(...found.answers);
  }
  if (!whole.length) throw new Error(`${files.map(({ name }) => name).join(", ")} contains no responses.`);
  const first = view.answers.length;
  for (const one of whole) add(player(one));
  view.token = whole[0].promptLength ?? 0;
  isPinned = true;
  show(first, whole.length > 1 ? first + 1 : view.a && first ? first - 1 : null);
  say(`Opened ${whole.length} responses.`);
}

function player(whole) {
  const [layers, topK] = whole.shape;
  const isServed = info && info.model === whole.model && info.num_layers === layers && info.top_k === topK;
  const known = { ...(isServed ? info : {}), ...whole.info };
  const highest = whole.rows.reduce((most, id) => Math.max(most, id), 0);
  const shape = {
    layers,
    topK,
    experts: known.num_experts ?? highest + 1,
    layerIds: known.layer_ids ?? Array.from({ length: layers }, (_, i) => i),
    knowsLayers: Boolean(known.layer_ids),
    knowsExperts: Boolean(known.num_experts),
    model: whole.model,
    hasWeights: Boolean(whole.weights),
    weightsScale: known.weights_scale,
  };
  if (shape.layerIds.length !== layers) throw new Error(`${whole.name}: rows have ${layers} layers, but the model has ${shape.layerIds.length}.`);
  if (highest >= shape.experts) throw new Error(`${whole.name}: expert id ${highest} is out of range: the model has ${shape.experts} experts.`);
  const made = new Player(whole, shape, changed);
  return { player: made, answer: made.answer };
}

async function openFiles(files) {
  hideError();
  try {
    open(await Promise.all(Array.from(files, async (file) => ({ name: file.name, text: await file.text() }))));
  } catch (error) {
    showError(error);
  }
}

/** Shows the selected answer again as it was made: 40 tokens a second, or in ten seconds. */
function play() {
  const place = chosen($("pick-a"));
  const entry = view.answers[place];
  entry.player ??= new Player(wholeOf(entry.answer), entry.answer, changed);
  const { length } = entry.player.whole.tokens;
  entry.answer = entry.player.replay(Math.max(40, length / 10));
  isPinned = false;
  show(place, chosen($("pick-b")));
}

function wholeOf(answer) {
  const { name, tokens, promptLength, start, finished, length, size, rows, weights } = answer;
  return { name, tokens, promptLength, start, finished, rows: rows.slice(0, length * size), weights: weights?.slice(0, length * size) };
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([line(view.a)], { type: "application/json" }));
  link.download = "answer.jsonl";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// ---- the server ----

async function send() {
  hideError();
  running?.abort();
  const request = new AbortController();
  running = request;
  const question = {
    kind: $("kind").value,
    prompt: $("prompt").value,
    maxTokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    seed: $("seed").value === "" ? null : Number($("seed").value),
  };
  const { num_layers: layers, top_k: topK, num_experts: experts, layer_ids: layerIds, model, weights_scale: weightsScale } = info;
  const shape = { layers, topK, experts, layerIds, knowsLayers: true, knowsExperts: true, model, hasWeights: Boolean(info.weights), weightsScale };
  const answer = new Answer(`${++asked}: ${shortened(question.prompt)}`, shape);
  const beside = chosen($("pick-b"));
  add({ answer, player: null });
  view.token = 0;
  isPinned = false;
  show(view.answers.length - 1, beside);
  say("Generating.");
  try {
    await ask(question, info.model, answer, request.signal, changed);
    say(`Response complete: ${summary(answer, "")}`);
  } catch (error) {
    answer.finished ??= error.name === "AbortError" ? "abort" : UNFINISHED;
    if (error.name !== "AbortError") showError(error);
  } finally {
    if (running === request) running = null;
    changed();
  }
}

const shortened = (text) => (visible(text).length > 30 ? `${visible(text).slice(0, 29)}…` : visible(text) || "(empty)");

function stop() {
  running?.abort();
  for (const { player } of view.answers) if (player && !player.isOver) player.perSecond = Infinity;
  changed();
}

function showError(error) {
  if (error instanceof ServerError && error.status === 401) {
    askForKey();
    $("key").value = "";
    error = new Error("The server rejected this API key.");
  }
  $("error").textContent = error.message;
  $("error").hidden = false;
}

function hideError() {
  $("error").hidden = true;
}

/** Starts with what the server told the page: that it has a file to show, wants a key, or captures nothing. */
async function start() {
  const told = document.documentElement.dataset;
  if (told.saved) return openSaved(JSON.parse(told.saved), JSON.parse(told.given));
  if (told.capture === "off") {
    $("notice").textContent = "This server does not capture routed experts. You can still open saved responses.";
    $("notice").hidden = false;
  } else if (told.apiKey) askForKey();
  else connect();
}

function askForKey() {
  $("key-form").hidden = false;
  $("ask").hidden = true;
  $("key").focus();
}

async function connect() {
  try {
    info = await getJson("v1/routed_experts");
  } catch (error) {
    return showError(error);
  }
  hideError();
  $("key-form").hidden = true;
  $("key").value = "";
  $("model").textContent = `${info.model}: ${info.num_layers} MoE layers, top ${info.top_k} of ${info.num_experts} experts`;
  $("ask").hidden = false;
  if (matchMedia("(min-width: 700px)").matches) $("prompt").focus();
}

async function openSaved(names, given) {
  $("model").textContent = names.join(", ");
  $("empty-how").textContent = "Open saved responses.";
  try {
    const text = async (_, i) => (await fetch(`routed_experts/saved/${i}`)).text();
    const texts = await Promise.all(names.map(text));
    open(texts.map((text, i) => ({ name: names[i], text })), given);
  } catch (error) {
    showError(error);
  }
}

// ---- buttons ----

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  connect();
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
$("stop").addEventListener("click", stop);
$("go").addEventListener("click", () => {
  const { position: token, layer } = view.comparison.first;
  select({ token, layer }, true);
});
$("play").addEventListener("click", play);
$("save").addEventListener("click", save);
$("pick-a").addEventListener("change", pick);
$("pick-b").addEventListener("change", pick);
$("file").addEventListener("change", (event) => {
  openFiles(event.target.files).then(() => (event.target.value = ""));
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  openFiles(event.dataTransfer.files);
});
$("colour").addEventListener("change", () => {
  view.colour = $("colour").value;
  $("rank-label").hidden = view.colour !== "expert";
  recolour();
});
$("rank").addEventListener("input", () => {
  view.rank = Math.max(Number($("rank").value) || 1, 1);
  recolour();
});
$("zoom").addEventListener("input", () => map.setZoom(2 ** Number($("zoom").value)));
$("fit").addEventListener("click", () => {
  map.setZoom(null);
  map.reveal(view.token);
});
$("window").addEventListener("change", weigh);
$("by").addEventListener("change", () => {
  view.byWeight = $("by").value === "weights";
  recolour();
});
new ResizeObserver(changed).observe($("views"));
watchTheme($("theme"), recolour);
start();
