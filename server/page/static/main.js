// Puts the page together: what is shown, what the keys and buttons do, and one drawing a frame.

import { Answer } from "./answer.js";
import { ask } from "./ask.js";
import { Balance, BalanceChart } from "./balance.js";
import { forgetTheme } from "./colours.js";
import { Comparison, checkSameModel, loadsInWords } from "./compare.js";
import { Detail } from "./detail.js";
import { balanceTable, loadTable, mapTable, save as saveFile, saveCsv, savePng } from "./download.js";
import { droppedFiles, groupsOf, inOrder, merged } from "./groups.js";
import { numberIn, putLink, readLink, writeLink } from "./link.js";
import { ExpertTokens, Lists } from "./lists.js";
import { LoadMap } from "./load.js";
import { TokenMap } from "./map.js";
import { Matrix } from "./matrix.js";
import { name } from "./names.js";
import { Player } from "./player.js";
import { UNFINISHED, line, read } from "./saved.js";
import { made } from "./sorted.js";
import { ServerError, getJson, useKey } from "./stream.js";
import { MapTable } from "./table.js";
import { TokenText, describe } from "./text.js";
import { watchTheme } from "./theme.js";
import { capital, visible } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const PAGE = 50; // tokens that the page keys go

/** What is shown. `entries` are all there are: responses {answer, player, file}, then groups {answer, player, members}. */
const view = {
  entries: [],
  entryA: null,
  entryB: null,
  a: null, // their answers
  b: null,
  comparison: null, // by position, of answers to one prompt; else loads are compared
  parting: "", // why not by position
  balanceA: null,
  balanceB: null,
  token: 0,
  layer: 0,
  expert: null,
  other: null, // the expert that a pair has with it
  colour: "usual",
  rank: 1,
  byWeight: false, // what the load adds up
  list: "layers",
  allLayers: false, // whether experts are listed of all layers
  pairs: "together",
  shade: "count",
  sorts: {}, // by list
  growing: false,
  changed,
};
let info = null; // what the server says of its rows; null without a server
let running = null; // the AbortController of the request under way
let asked = 0;
let viewed = []; // the files of `routed-experts view`: {name, place}; large ones are opened when they are picked
let picked = null; // the entry that was chosen to compare with
let isPinned = false; // whether a token was selected by hand while the answer grows

const map = new TokenMap($("map"), view, select);
const load = new LoadMap($("load"), view, select);
const chart = new BalanceChart($("balance"), view, select);
const detail = new Detail($("detail"), select);
const table = new MapTable($("table"), view);
const lists = new Lists($("lists"), view, select, (place) => {
  if (place === view.entries.indexOf(view.entryA)) return;
  $("pick-b").value = String(place);
  pick();
});
const expertTokens = new ExpertTokens($("expert-tokens"), view, select);
const matrix = new Matrix($("matrix"), $("pairs-table"), view, select);
const texts = [new TokenText($("tokens-a"), "a", select), new TokenText($("tokens-b"), "b", select)];

// ---- drawing ----

const REST = 60; // milliseconds between two drawings of all but the map, while an answer grows
const LONG_REST = 600; // and of lists and the matrix
const KEYS_REST = 80; // between two of these while keys are pressed
let isScheduled = false;
let drawn = 0;
let slowlyDrawn = 0;
let slowly = null;

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
    for (const player of players()) more = player.step(now) || more;
    if (view.comparison) more = view.comparison.extend() || more;
    if (view.comparison?.hasOtherPrompts) compareByLoad(`The prompts differ from position ${view.comparison.firstToken}. `);
  } catch (error) {
    showError(error);
  }
  for (const balance of [view.balanceA, view.balanceB]) if (balance) more = balance.extend() || more;
  const wasGrowing = view.growing;
  view.growing = [view.a, view.b].some((answer) => answer && answer.finished === null);
  map.following = !isPinned;
  if ((view.growing || wasGrowing) && !isPinned) view.token = Math.max(view.a.end - 1, 0);
  isPinned ||= !view.growing;
  if (wasGrowing && !view.growing) reveal();
  if (draw(now) || more) changed();
  else writeLink(linkFields);
}

/** The players of what is shown that are not at the end. */
const players = () => [view.entryA, view.entryB].map((entry) => entry?.player).filter((player) => player && !player.isOver);

/** Draws everything; whether some is left for the next frame. */
function draw(now) {
  const { a, b, comparison, token } = view;
  map.draw();
  write("map-status", cellInWords(map.hover ?? view));
  if (view.growing && now - drawn < REST) return true;
  drawn = now;
  load.draw();
  chart.draw();
  detail.draw({ ...view, b: comparison && b });
  drawSlowly();
  let more = map.more;
  const firstToken = comparison?.firstToken ?? null;
  [a, b].forEach((answer, i) => {
    if (!answer) return;
    texts[i].draw(i && !comparison ? null : token, { isStreaming: answer.finished === null && !isPinned, firstToken });
    texts[i].highlight(view.layer, view.expert);
    more = texts[i].shade(map.rarity(i)) || more;
  });
  write("summary", summary(a, b ? "A: " : "") + (b ? ` ${summary(b, "B: ")}` : ""));
  $("parting").hidden = !b;
  if (b) {
    write("parting-text", comparison ? comparison.sentence() : view.parting + loadsInWords(a, b));
    $("go").hidden = !comparison?.first;
  }
  write("detail-token", describe(a, token));
  write("load-status", loadInWords());
  write("balance-status", balanceInWords());
  write("matrix-status", matrix.words());
  $("stop").disabled = !running && !players().length;
  return more;
}

/** Draws what takes longer, when the keys rest. */
function drawSlowly() {
  clearTimeout(slowly);
  const wait = slowlyDrawn + (view.growing ? LONG_REST : KEYS_REST) - performance.now();
  if (wait > 0) slowly = setTimeout(changed, wait);
  else {
    lists.draw();
    expertTokens.draw();
    matrix.draw();
    write("expert-status", expertInWords());
    $("expert-tokens").hidden = view.expert === null;
    if (document.activeElement !== $("expert")) $("expert").value = view.expert ?? "";
    slowlyDrawn = performance.now();
  }
}

/** Sets a text, only where it changes: the browser would lay the page out anew. */
function write(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function summary(answer, name) {
  if (answer.parts) return `${name}${answer.parts.length} responses, ${answer.length} rows of ${answer.layers} layers × ${answer.topK} of ${answer.experts} experts.`;
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
  if (!comparison) return `${words}${ids(a)}`;
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

function expertInWords() {
  const { a, b, layer, expert } = view;
  const name = capital(a.layerName(layer));
  if (expert === null) return `${name}: click an expert, or enter its number, to see its tokens.`;
  const count = (answer) => (expert < answer.experts ? answer.counts[layer * answer.experts + expert] : 0);
  return `${name}, expert ${expert}: ${count(a)} of ${a.length} tokens${b ? `; in B ${count(b)} of ${b.length}` : ""}.`;
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
  if (cell.layer !== undefined && cell.expert === undefined && cell.layer !== view.layer) view.expert = view.other = null;
  if (cell.expert !== undefined && cell.other === undefined && cell.expert !== view.expert) view.other = null;
  Object.assign(view, cell);
  const coming = players().map(({ whole }) => whole.tokens.length);
  const last = Math.max(view.a.tokens.length, view.a.end, view.b?.end ?? 0, ...coming) - 1;
  view.token = Math.min(Math.max(view.token, 0), Math.max(last, 0));
  view.layer = Math.min(Math.max(view.layer, 0), view.a.layers - 1);
  reveal();
  if (isSpoken) say(cellInWords(view));
  changed();
}

/** Brings the selected token into sight. */
function reveal() {
  map.reveal(view.token);
  texts[0].reveal(view.token);
  if (view.comparison) texts[1].reveal(view.token);
  table.show(view.token);
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
const pairBy = (by, otherBy) => ({ a, layer, expert, other }) => {
  const moved = (at, by) => (at === null ? 0 : Math.min(Math.max(at + by, 0), a.experts - 1));
  return { layer, expert: moved(expert, by), other: moved(other, otherBy) };
};
onKeys($("matrix"), {
  ...{ ArrowUp: pairBy(-1, 0), ArrowDown: pairBy(1, 0), ArrowLeft: pairBy(0, -1), ArrowRight: pairBy(0, 1) },
  Escape: ({ layer }) => ({ layer, expert: null }),
});
$("matrix").addEventListener("keydown", () => view.a && say(matrix.words()));

// ---- answers ----

/** Adds responses, and the groups that they make up. */
function add(...added) {
  const responses = [...view.entries.filter(({ members }) => !members), ...added];
  const groups = groupsOf(responses).map(({ name, members }) => view.entries.find((known) => known.name === name && known.members?.length === members.length) ?? group(name, members));
  view.entries = [...responses, ...groups];
  for (const pick of [$("pick-a"), $("pick-b")]) {
    const options = view.entries.map((entry, i) => new Option(nameOf(entry), String(i)));
    const among = made("optgroup", { label: "Groups" }, ...options.splice(responses.length));
    const unopened = viewed.filter(({ name }) => !responses.some(({ file }) => file === name));
    const rest = made("optgroup", { label: "Not opened yet" }, ...unopened.map(({ name, place }) => new Option(name, `${UNOPENED}${place}`)));
    pick.replaceChildren(pick.options[0], ...options, ...[among, rest].filter((group) => group.children.length));
  }
  $("pick-a").options[0].hidden = true;
}

/** A group, whose responses are put together when it is first shown. */
function group(name, members) {
  let made = null;
  const make = () => (made ??= player(merged(name, members.map((entry) => entry.player.whole))));
  return {
    ...{ name, members },
    get player() {
      return make().player;
    },
    get answer() {
      return make().answer;
    },
  };
}

const nameOf = ({ name, members, answer }) => (members ? `${name} (${members.length} responses)` : answer.name);

/** Shows one or two entries. */
function show(entryA, entryB) {
  try {
    const a = entryA.answer;
    Object.assign(view, { a, b: null, comparison: null, parting: "", entryA, entryB: null, expert: null, other: null });
    if (entryB) {
      if (a.parts || entryB.answer.parts) checkSameModel(a, entryB.answer);
      else view.comparison = new Comparison(a, entryB.answer);
      Object.assign(view, { b: entryB.answer, entryB });
    }
  } catch (error) {
    showError(error);
  }
  if (!view.a) return;
  view.layer = Math.min(view.layer, view.a.layers - 1);
  $("pick-a").value = String(view.entries.indexOf(view.entryA));
  $("pick-b").value = view.entryB ? String(view.entries.indexOf(view.entryB)) : "";
  texts[0].reset(view.a);
  if (view.b) texts[1].reset(view.b);
  $("side-b").hidden = $("name-a").hidden = !view.b;
  $("name-a").textContent = `A: ${view.a.name}`;
  $("name-b").textContent = `B: ${view.b?.name}`;
  document.body.classList.toggle("two", Boolean(view.b));
  weigh();
  detail.build({ ...view, b: view.comparison && view.b });
  $("rank").max = view.a.topK;
  $("expert").max = view.a.experts - 1;
  $("views").hidden = false;
  $("empty").hidden = true;
  $("save").disabled = $("play").disabled = Boolean(view.a.parts);
  $("link").disabled = false;
  notify();
  recolour();
  table.show(view.token);
}

/** Leaves positions alone where they do not have the same tokens. */
function compareByLoad(parting) {
  Object.assign(view, { comparison: null, parting });
  detail.build({ ...view, b: null });
  recolour();
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
    matrix.legend($("matrix-legend"), $("matrix-legend-text"));
    chart.forget();
  }
  changed();
}

const UNOPENED = "unopened "; // before the place of such a file, as an option's value
const chosen = (pick) => (pick.value === "" ? null : view.entries[pick.value]);

async function pick() {
  const fileOf = ({ value }) => viewed.find(({ place }) => value === `${UNOPENED}${place}`);
  const [a, b] = [fileOf($("pick-a")), fileOf($("pick-b"))];
  if (a) return openViewed([a]);
  if (b) {
    const { entryA: before, token } = view;
    await openViewed([b]);
    picked = view.entryA === before ? null : view.entryA;
    view.token = token;
    return show(before, picked);
  }
  if (!chosen($("pick-a"))) return;
  link = null;
  picked = chosen($("pick-b"));
  show(chosen($("pick-a")), picked);
}

/** Shows the answers in the texts of files: [{name, text}]. */
function open(files) {
  const added = [];
  let about = {};
  for (const { name, text } of files) {
    const found = read(text, name, about);
    about = found.about;
    added.push(...found.answers.map((whole) => ({ ...player(whole), file: name })));
  }
  if (!added.length) throw new Error(`${files.map(({ name }) => name).join(", ")} contains no responses.`);
  add(...added);
  const folders = view.entries.filter(({ name, members }) => name?.endsWith("/") && members.some((entry) => added.includes(entry)));
  const [a, b] = folders.length > 1 ? folders : [added[0], null];
  view.token = a.members ? 0 : (a.answer.promptLength ?? 0);
  isPinned = true;
  show(a, b);
  say(`Opened ${added.length} responses.`);
  followLink();
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
    parts: whole.parts,
  };
  if (shape.layerIds.length !== layers) throw new Error(`${whole.name}: rows have ${layers} layers, but the model has ${shape.layerIds.length}.`);
  if (highest >= shape.experts) throw new Error(`${whole.name}: expert id ${highest} is out of range: the model has ${shape.experts} experts.`);
  if (isServed) for (const token of whole.tokens) if (token.text === null && token.id !== null) name(token, changed);
  const player = new Player(whole, shape);
  return { player, answer: player.answer };
}

/** Opens files or responses {name, file}, or a promise of them. */
async function openFiles(files) {
  hideError();
  try {
    open(await Promise.all((await files).map(async ({ name, file }) => ({ name, text: await (await file).text() }))));
  } catch (error) {
    showError(error);
  }
}

/** Shows the selected answer again as it was made: 40 tokens a second, or in ten seconds. */
function play() {
  const entry = view.entryA;
  entry.player ??= new Player(wholeOf(entry.answer), entry.answer);
  const { length } = entry.player.whole.tokens;
  entry.answer = entry.player.replay(Math.max(40, length / 10));
  isPinned = false;
  show(entry, view.entryB);
}

function wholeOf(answer) {
  const { name, tokens, promptLength, start, finished, length, size, rows, weights } = answer;
  return { name, tokens, promptLength, start, finished, rows: rows.slice(0, length * size), weights: weights?.slice(0, length * size) };
}

function save() {
  saveFile(new Blob([line(view.a)], { type: "application/json" }), "answer.jsonl");
}

/** What the buttons with data-save write: what is shown, as numbers or as a picture. */
const SAVES = {
  "map.csv": (name) => saveCsv(...mapTable(view.a), name),
  "load.csv": (name) => saveCsv(...loadTable(view.a), name),
  "balance.csv": (name) => saveCsv(...balanceTable(view.a, view.balanceA), name),
  "pairs.csv": (name) => matrix.saveCsv(name),
  "list.csv": (name) => lists.table.saveCsv(name),
  "expert.csv": (name) => expertTokens.table.saveCsv(name),
  "map.png": (name) => savePng(map.canvas, name),
  "load.png": (name) => savePng(load.canvas, name),
  "balance.png": (name) => savePng(chart.canvas, name),
  "pairs.png": (name) => savePng(matrix.canvas, name),
};

// ---- the link ----

let link = readLink(); // until what it names is open
const CONTROLS = ["colour", "rank", "by", "window", "list", "scope", "pairs", "shade"];
const initial = (control) => (control.options ? control.options[0].value : control.defaultValue);

const UNSAVED = "a response that was not saved";

/** The view in words of a link; only responses from files can be named. */
function linkFields() {
  if (link) return { ...link };
  const { entryA, entryB, a, layer, token, expert, other, list, sorts } = view;
  const name = (entry) => entry && (entry.name ?? (entry.file ? entry.answer.name : UNSAVED));
  const controls = CONTROLS.map((id) => [id, $(id).value === initial($(id)) ? null : $(id).value]);
  const fields = { a: name(entryA), b: name(entryB), token, layer: a.layerIds[layer], expert, other, ...Object.fromEntries(controls) };
  return { ...fields, sort: sorts[list], sort_expert: sorts.expert, sort_pairs: sorts.pairs, zoom: map.zoom };
}

/** Shows what the link says, if the responses that it names are open; else says which files to open. */
function followLink() {
  if (!link) return;
  const fields = link;
  const find = (name) => view.entries.find((entry) => name && (entry.name ?? entry.answer.name) === name);
  const absent = [fields.a, fields.b].filter((name) => name && !find(name));
  if (absent.includes(UNSAVED)) {
    link = null;
    return notify(`This link shows ${UNSAVED}: links carry no responses.`);
  }
  if (absent.some((name) => name.startsWith(EXAMPLE)) && !view.entries.some(({ file }) => file === EXAMPLE)) return openExample();
  notify(absent.length && `This link shows ${absent.join(" and ")}: open ${absent.length > 1 ? "these files" : "this file"} to see it.`);
  if (absent.length || !view.a) return;
  link = null;
  Object.assign(view.sorts, { [fields.list ?? "layers"]: fields.sort, expert: fields.sort_expert, pairs: fields.sort_pairs });
  for (const id of CONTROLS) {
    $(id).value = fields[id] ?? initial($(id));
    if ($(id).value === "") $(id).value = initial($(id));
    for (const kind of ["input", "change"]) $(id).dispatchEvent(new Event(kind));
  }
  show(find(fields.a) ?? view.entryA, find(fields.b) ?? (fields.a ? null : view.entryB));
  const within = (text, end) => (numberIn(text) < end ? numberIn(text) : null);
  const layer = Math.max(view.a.layerIds.indexOf(numberIn(fields.layer)), 0);
  const cell = { layer, expert: within(fields.expert, view.a.experts), other: within(fields.other, view.a.experts) };
  select({ ...cell, token: numberIn(fields.token) ?? view.token });
  map.setZoom(fields.zoom === "fit" ? "fit" : Number(fields.zoom) || null);
  reveal();
}

async function copyLink() {
  const fields = linkFields();
  putLink(fields);
  if ([fields.a, fields.b].includes(UNSAVED)) notify("The link carries the view, not the response, which is not saved: save it, and open the file.");
  try {
    await navigator.clipboard.writeText(location.href);
    say("Copied the link.");
  } catch {
    say("The link is in the address bar."); // browsers refuse outside of HTTPS
  }
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
  const begun = () => {
    const entry = { answer, player: null };
    link = null;
    add(entry);
    view.token = 0;
    isPinned = false;
    show(entry, view.entryB === picked ? picked : null);
    say("Generating.");
  };
  $("stop").disabled = false;
  try {
    await ask(question, info.model, answer, request.signal, begun, changed);
    say(`Response complete: ${summary(answer, "")}`);
  } catch (error) {
    answer.finished ??= error.name === "AbortError" ? "abort" : UNFINISHED;
    if (error.name !== "AbortError") showError(error);
  } finally {
    if (running === request) running = null;
    $("stop").disabled = !running && !players().length;
    changed();
  }
}

const shortened = (text) => (visible(text).length > 30 ? `${visible(text).slice(0, 29)}…` : visible(text) || "(empty)");

function stop() {
  running?.abort();
  for (const player of players()) player.perSecond = Infinity;
  changed();
}

function notify(words) {
  $("notice").textContent = words || "";
  $("notice").hidden = !words;
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
  if (told.saved) return openSaved(JSON.parse(told.saved));
  followLink();
  if (told.capture === "off") {
    notify("This server does not capture routed experts. You can still open saved responses.");
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

const AT_FIRST = 32 << 20; // bytes of files that are opened at once

/** Opens the files of `routed-experts view`, [[name, bytes]], as many as are small; the others when they are picked. */
async function openSaved(files) {
  $("model").textContent = files.length > 5 ? `${files.length} files` : files.map(([name]) => name).join(", ");
  $("empty-how").textContent = "Open saved responses, or drop files or folders here.";
  let bytes = 0;
  viewed = files.map(([name, size], place) => ({ name, place, end: (bytes += size) }));
  const first = viewed.filter(({ end, place }) => !place || end <= AT_FIRST);
  if (first.length) await openViewed(first);
  else followLink();
}

const openViewed = (files) => openFiles(files.map(({ name, place }) => ({ name, file: fetch(`routed_experts/saved/${place}`) })));

const EXAMPLE = "example.json";

/** Responses of the tiny model to two prompts. */
const openExample = () => openFiles([{ name: EXAMPLE, file: fetch(`routed_experts/${EXAMPLE}`) }]);

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
for (const input of [$("file"), $("folder")]) {
  input.addEventListener("change", () => {
    const files = Array.from(input.files, (file) => ({ name: file.webkitRelativePath || file.name, file }));
    openFiles(inOrder(files)).then(() => (input.value = ""));
  });
}
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  openFiles(droppedFiles(event.dataTransfer));
});
$("example").addEventListener("click", openExample);
$("link").addEventListener("click", copyLink);
addEventListener("hashchange", () => {
  link = readLink();
  followLink();
});
document.addEventListener("click", ({ target }) => {
  const { save: name } = target.dataset;
  if (name && view.a) SAVES[name](name);
});
$("expert").addEventListener("input", () => {
  const expert = numberIn($("expert").value);
  if (view.a) select({ layer: view.layer, expert: expert !== null && expert < view.a.experts ? expert : null });
});
for (const [id, change] of Object.entries({
  list: (value) => (view.list = value),
  scope: (value) => (view.allLayers = value === "all"),
  pairs: (value) => (view.pairs = value),
  shade: (value) => (view.shade = value),
})) {
  $(id).addEventListener("change", () => {
    change($(id).value);
    $("scope-label").hidden = view.list !== "experts";
    if (view.a) matrix.legend($("matrix-legend"), $("matrix-legend-text"));
    changed();
  });
}
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
  map.setZoom("fit");
  $("zoom").value = Math.log2(map.cellWidth);
});
$("window").addEventListener("change", weigh);
$("by").addEventListener("change", () => {
  view.byWeight = $("by").value === "weights";
  recolour();
});
new ResizeObserver(changed).observe($("views"));
watchTheme($("theme"), recolour);
start();
