// The responses that there are, and which of them are shown.

import { Answer } from "./answer.js";
import { checkSameModel, Comparison } from "./compare.js";
import { $, made } from "./dom.js";
import { save as saveFile } from "./download.js";
import { build } from "./drawing.js";
import { hideError, notify, say, showError } from "./messages.js";
import { name as nameToken } from "./names.js";
import { profilesOf } from "./profile.js";
import { groupOf, groupsIn, partOf } from "./samples.js";
import { line, Reader } from "./saved.js";
import { failed, server } from "./server.js";
import { request } from "./stream.js";
import { changed, stayWithin, view } from "./view.js";

export const EXAMPLE = "example.json";
const AT_FIRST = 32 << 20; // bytes of files that are opened at once
const GROUP = "group "; // before the place of a group, as an option's value
const UNOPENED = "unopened "; // before the place of such a file, as an option's value

const responses = []; // Answers
let viewed = []; // the files of `routed-experts view`: {name, place}; large ones are opened when they are picked, and then have `info`
let groups = []; // of responses that can be shown as one: {name, members}
let picked = null; // the response that was chosen to compare with

/** The response that a link names. */
export const responseOf = (file) => responses.find((answer) => answer.file && answer.name === file);
export const hasExample = () => responses.some(({ file }) => file === EXAMPLE);

function add(...added) {
  responses.push(...added);
  for (const pick of [$("pick-a"), $("pick-b")]) {
    const options = responses.map(({ name }, i) => new Option(name, String(i)));
    const unopened = viewed.filter(({ info }) => !info);
    const rest = made("optgroup", { label: "Not opened yet" }, ...unopened.map(({ name, place }) => new Option(name, `${UNOPENED}${place}`)));
    groups = groupsIn(responses);
    const together = made("optgroup", { label: "Several as one" }, ...groups.map(({ name }, i) => new Option(name, `${GROUP}${i}`)));
    pick.replaceChildren(pick.options[0], ...options, ...(groups.length ? [together] : []), ...(unopened.length ? [rest] : []));
  }
  $("pick-a").options[0].hidden = true;
}

/** Shows one or two responses; samples are compared by load. */
export function show(a, b) {
  Object.assign(view, { a, b: null, comparison: null, parting: "", expert: null, isRevealed: false });
  try {
    if (b) {
      checkSameModel(a, b);
      Object.assign(view, { comparison: a.isSample || b.isSample ? null : new Comparison(a, b), b });
    }
  } catch (error) {
    showError(error);
  }
  stayWithin();
  $("pick-a").value = valueOf(a);
  $("pick-b").value = view.b ? valueOf(view.b) : "";
  notify("");
  build();
}

/** What a list has as the value of an answer's option. */
function valueOf(answer) {
  const group = groups.findIndex(({ joined }) => joined === answer);
  return group < 0 ? String(responses.indexOf(answer)) : `${GROUP}${group}`;
}

/** The answer of an option: a response, or several as one, which are joined once they are chosen. */
function chosenIn({ value }) {
  if (value === "") return null;
  if (!value.startsWith(GROUP)) return responses[value];
  const group = groups[Number(value.slice(GROUP.length))];
  group.joined ??= groupOf(group.name, group.members);
  return group.joined;
}

/** Compares some tokens of the first response with all of it. */
export function comparePart(name, positions) {
  const { a } = view;
  const known = positions.filter((position) => position >= a.start && position < a.end);
  if (!known.length) return notify("None of these tokens has experts.");
  const part = partOf(`${name} of ${a.name}`, a, known);
  add(part);
  show(a, part);
}

/** Whether what is chosen in a list needs no file to be opened. */
export const isOpened = ({ value }) => !value.startsWith(UNOPENED);

/** Shows what is chosen in the two lists. */
export async function pick() {
  const fileOf = ({ value }) => viewed.find(({ place }) => value === `${UNOPENED}${place}`);
  const [a, b] = [fileOf($("pick-a")), fileOf($("pick-b"))];
  if (a) return openViewed([a]);
  if (b) {
    const { a: before, token } = view;
    await openViewed([b]);
    picked = view.a === before ? null : view.a;
    view.token = token;
    return show(before, picked);
  }
  picked = chosenIn($("pick-b"));
  show(chosenIn($("pick-a")) ?? view.a, picked);
}

/** Shows an answer that begins to come, beside what was chosen to compare with. */
export function begin(answer) {
  add(answer);
  Object.assign(view, { token: 0, isPinned: false });
  closeForm();
  show(answer, view.b === picked ? picked : null);
}

/** The form's title takes the focus that was in it. */
function closeForm() {
  const hadFocus = $("ask").contains(document.activeElement);
  $("ask").open = false;
  if (hadFocus) $("ask").querySelector("summary").focus();
}

/** Opens files, or a promise of them, and shows the first answer in them. */
export const openFiles = (files) => open(new Reader(), async () => (await files).map(({ name, file }) => ({ name, stream: () => file.stream() })));

/** Opens what `found` gives, [{name, stream: a function that gives its bytes}]: all of it, or nothing. */
async function open(reader, found, opened = () => {}) {
  hideError();
  try {
    const added = [];
    for (const { name, stream } of await found()) {
      for await (const whole of reader.read(name, await stream())) added.push(answerOf(whole));
    }
    opened();
    if (!added.length) throw new Error("These files contain no responses.");
    add(...added);
    Object.assign(view, { token: added[0].promptLength ?? 0, isPinned: true });
    $("ask").open = false;
    show(added[0], null);
    say(`Opened ${added.length} responses.`);
  } catch (error) {
    failed(error);
  }
}

/** A whole answer with what is known of it by itself, or by the server that has its model. */
function answerOf(whole) {
  const { name, model, rows, weights, tokens, shape: [, layers, topK] } = whole;
  const isServed = server.info?.model === model && server.info.num_layers === layers && server.info.top_k === topK;
  const info = { ...(isServed ? server.info : {}), ...whole.info, num_layers: layers, top_k: topK };
  const highest = rows.reduce((most, id) => Math.max(most, id), 0);
  const experts = info.num_experts ?? highest + 1;
  const known = info.layer_ids?.length ?? layers;
  if (known !== layers) throw new Error(`${name}: rows have ${layers} layers, but the model has ${known}.`);
  if (highest >= experts) throw new Error(`${name}: expert id ${highest} is out of range: the model has ${experts} experts.`);
  if (isServed) for (const token of tokens) if (token.text === null && token.id !== null) nameToken(token, changed);
  const answer = new Answer({ ...whole, info, experts, hasWeights: Boolean(weights) });
  answer.addRows(rows, weights);
  return answer;
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

/** In their order: what one says of its model holds for those after it. */
function openViewed(files) {
  const before = viewed.slice(0, files[0].place).findLast(({ info }) => info);
  const reader = new Reader(before?.info);
  const found = files.map(({ name, place }) => ({ name, stream: () => bytesAt(`routed_experts/saved/${place}`) }));
  return open(reader, () => found, () => files.forEach((file) => (file.info = reader.info)));
}

const bytesAt = async (path) => (await request(path)).body;

/** Two responses of a trained model, to code and to prose. */
export const openExample = () => open(new Reader(), () => [{ name: EXAMPLE, stream: () => bytesAt(`routed_experts/${EXAMPLE}`) }]);

/** Shows the load of all that the server has computed; from the second time on, of what came since the time before. */
export async function openProfile() {
  hideError();
  try {
    const profiles = profilesOf(await (await request("v1/routed_experts/profile")).json(), server.info);
    add(...profiles);
    $("ask").open = false;
    show(profiles.at(-1), null);
  } catch (error) {
    failed(error);
  }
}

export function save() {
  saveFile(new Blob([line(view.a)], { type: "application/json" }), "answer.jsonl");
}
