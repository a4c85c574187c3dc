// Groups of opened responses, those of a file, of a folder or all: each is one answer whose tokens follow one another.

import { join } from "./saved.js";

/**
 * [{name, members}] of entries {answer, file}; a group has several members, of one model, and other ones than the groups
 * before it. A folder is a group whatever it has, if there are several: they are there to be compared.
 */
export function groupsOf(entries) {
  const opened = entries.filter(({ file }) => file);
  const groups = new Map();
  const add = (name, entry) => groups.has(name) ? groups.get(name).push(entry) : groups.set(name, [entry]);
  const folders = new Set(opened.map(folderOf).filter(Boolean));
  const isOneOfSeveral = (name) => folders.size > 1 && folders.has(name);
  const names = [({ file }) => file, folderOf];
  if (folders.size > 1) names.reverse(); // of one file in a folder, the folder's name is the group's
  for (const nameOf of names) for (const entry of opened) if (nameOf(entry)) add(nameOf(entry), entry);
  for (const entry of opened) add("all opened responses", entry);
  const known = new Set();
  const isNew = (members) => {
    const key = members.map((entry) => entries.indexOf(entry)).join();
    return !known.has(key) && known.add(key);
  };
  const isOfOneModel = (members) => new Set(members.map(({ answer }) => [answer.layers, answer.topK, answer.layerIds].join())).size === 1;
  return [...groups].filter(([name, members]) => (members.length > 1 || isOneOfSeveral(name)) && isNew(members) && isOfOneModel(members)).map(([name, members]) => ({ name, members }));
}

const folderOf = ({ file }) => file.slice(0, file.lastIndexOf("/") + 1);

/**
 * The whole answer of a group, without the tokens that have no rows. Its `parts` say where each response begins:
 * [{name, first: the position here, start: the position there, promptLength}].
 */
export function merged(name, wholes) {
  const [one] = wholes;
  const tokens = [];
  const parts = wholes.map(({ name, start, promptLength, rows, shape, tokens: own }) => {
    const [first, count] = [tokens.length, rows.length / (shape[0] * shape[1])];
    for (let i = start; i < start + count; i++) tokens.push(own[i] ?? { id: null, text: null });
    return { name, first, start, promptLength };
  });
  return {
    ...{ name, tokens, parts, model: one.model, shape: one.shape, start: 0, promptLength: null, finished: "group" },
    info: Object.assign({}, ...wholes.map(({ info }) => info)),
    rows: join(wholes.map(({ rows }) => rows)),
    weights: wholes.every(({ weights }) => weights) ? join(wholes.map(({ weights }) => weights)) : null,
  };
}

/** The files that were dropped, also those in folders: [{name: with its folders, file}]. Must be called in the event. */
export async function droppedFiles(transfer) {
  const entries = Array.from(transfer.items, (item) => item.webkitGetAsEntry?.());
  if (!entries.some((entry) => entry?.isDirectory)) return inOrder(Array.from(transfer.files, (file) => ({ name: file.name, file })));
  return inOrder((await Promise.all(entries.filter(Boolean).map(filesIn))).flat());
}

export const inOrder = (files) => files.sort((one, other) => one.name.localeCompare(other.name));

async function filesIn(entry) {
  if (entry.isFile) return [{ name: entry.fullPath.slice(1), file: await new Promise((done, fail) => entry.file(done, fail)) }];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((done, fail) => reader.readEntries(done, fail)); // a hundred at a time
    if (!some.length) return found;
    found.push(...(await Promise.all(some.map(filesIn))).flat());
  }
}
