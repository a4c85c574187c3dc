// The responses that there are, and which of them are shown.

import { Comparison } from "./compare.js";
import { $, made } from "./dom.js";
import { save as saveFile } from "./download.js";
import { build } from "./drawing.js";
import { hideError, notify, say, showError } from "./messages.js";
import { name } from "./names.js";
import { Player } from "./player.js";
import { line, read } from "./saved.js";
import { server } from "./server.js";
import { changed, view } from "./view.js";

export const EXAMPLE = "example.json";
const AT_FIRST = 32 << 20; // bytes of files that are opened at once
const UNOPENED = "unopened "; // before the place of such a file, as an option's value

const responses = []; // {answer, player, file}
let viewed = []; // the files of `routed-experts view`: {name, place}; large ones are opened when they are picked
let picked = null; // the response that was chosen to compare with

/** The response that a link names. */
export const responseOf = (file) => responses.find((entry) => entry.file && entry.answer.name === file);
export const hasExample = () => responses.some(({ file }) => file === EXAMPLE);

function add(...added) {
  responses.push(...added);
  for (const pick of [$("pick-a"), $("pick-b")]) {
    const options = responses.map(({ answer }, i) => new Option(answer.name, String(i)));
    const unopened = viewed.filter(({ name }) => !responses.some(({ file }) => file === name));
    const rest = made("optgroup", { label: "Not opened yet" }, ...unopened.map(({ name, place }) => new Option(name, `${UNOPENED}${place}`)));
    pick.replaceChildren(pick.options[0], ...options, ...(unopened.length ? [rest] : []));
  }
  $("pick-a").options[0].hidden = true;
}

/** Shows one or two responses. */
export function show(entryA, entryB) {
  Object.assign(view, { a: entryA.answer, b: null, comparison: null, parting: "", entryA, entryB: null, expert: null });
  try {
    if (entryB) Object.assign(view, { comparison: new Comparison(view.a, entryB.answer), b: entryB.answer, entryB });
  } catch (error) {
    showError(error);
  }
  view.layer = Math.min(view.layer, view.a.layers - 1);
  $("pick-a").value = String(responses.indexOf(entryA));
  $("pick-b").value = view.entryB ? String(responses.indexOf(view.entryB)) : "";
  notify();
  build();
}

/** Whether what is chosen in a list needs no file to be opened. */
export const isOpened = ({ value }) => !value.startsWith(UNOPENED);

/** Shows what is chosen in the two lists. */
export async function pick() {
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
  const chosen = ({ value }) => (value === "" ? null : responses[value]);
  picked = chosen($("pick-b"));
  show(chosen($("pick-a")) ?? view.entryA, picked);
}

/** Shows an answer that begins to come, beside what was chosen to compare with. */
export function begin(answer) {
  const entry = { answer, player: null };
  add(entry);
  Object.assign(view, { token: 0, isPinned: false });
  show(entry, view.entryB === picked ? picked : null);
}

/** Opens files or responses {name, file}, or a promise of them, and shows the first answer in them. */
export async function openFiles(files) {
  hideError();
  try {
    open(await Promise.all((await files).map(async ({ name, file }) => ({ name, text: await (await file).text() }))));
  } catch (error) {
    showError(error);
  }
}

function open(files) {
  const added = [];
  let about = {};
  for (const { name, text } of files) {
    const found = read(text, name, about);
    about = found.about;
    added.push(...found.answers.map((whole) => ({ ...playing(whole), file: name })));
  }
  if (!added.length) throw new Error(`${files.map(({ name }) => name).join(", ")} contains no responses.`);
  add(...added);
  Object.assign(view, { token: added[0].answer.promptLength ?? 0, isPinned: true });
  show(added[0], null);
  say(`Opened ${added.length} responses.`);
}

/** What is known of a whole answer, by itself or by the server that has its model. */
function playing(whole) {
  const [layers, topK] = whole.shape;
  const { info } = server;
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
  if (isServed) for (const token of whole.tokens) if (token.text === null && token.id !== null) name(token, changed);
  const player = new Player(whole, shape);
  return { player, answer: player.answer };
}

/** Opens the files of `routed-experts view`, [[name, bytes]], as many as are small; the others when they are picked. */
export async function openSaved(files) {
  $("model").textContent = files.length > 5 ? `${files.length} files` : files.map(([name]) => name).join(", ");
  $("empty-how").textContent = "Open saved responses, or drop files or folders here.";
  let bytes = 0;
  viewed = files.map(([name, size], place) => ({ name, place, end: (bytes += size) }));
  const first = viewed.filter(({ end, place }) => !place || end <= AT_FIRST);
  if (first.length) await openViewed(first);
}

const openViewed = (files) => openFiles(files.map(({ name, place }) => ({ name, file: fetch(`routed_experts/saved/${place}`) })));

/** Responses of the tiny model to two prompts. */
export const openExample = () => openFiles([{ name: EXAMPLE, file: fetch(`routed_experts/${EXAMPLE}`) }]);

/** Shows the selected answer again as it was made: 40 tokens a second, or in ten seconds. */
export function play() {
  const entry = view.entryA;
  entry.player ??= new Player(entry.answer.whole(), entry.answer);
  const { length } = entry.player.whole.tokens;
  entry.answer = entry.player.replay(Math.max(40, length / 10));
  view.isPinned = false;
  show(entry, view.entryB);
}

export function save() {
  saveFile(new Blob([line(view.a)], { type: "application/json" }), "answer.jsonl");
}
