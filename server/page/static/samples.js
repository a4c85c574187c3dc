// Tokens of one or several responses as one answer, whose load can be compared.

import { Answer } from "./answer.js";

/** Of all responses in a folder or file. `members` stay, as chance deals them. */
export function groupOf(name, members) {
  const parts = members.map((answer) => ({ answer, positions: knownPositions(answer) }));
  return Object.assign(joined(name, parts), { members });
}

/** Of some positions of a response. */
export function partOf(name, answer, positions) {
  return Object.assign(joined(name, [{ answer, positions }]), { whole: answer });
}

/** The positions of an answer that have a row. */
const knownPositions = ({ start, length }) => Array.from({ length }, (_, row) => start + row);

/** An answer of tokens with their rows, one after the other; `begins` has where those of a response begin. */
function joined(name, parts) {
  const answers = parts.map(({ answer }) => answer);
  const [{ model, info, size }] = answers;
  const hasWeights = answers.every((answer) => answer.hasWeights);
  const experts = Math.max(...answers.map((answer) => answer.experts));
  const sample = new Answer({ name, model, info, hasWeights, experts, finished: "sample" });
  sample.begins = new Set();
  for (const { answer, positions } of parts) {
    sample.begins.add(sample.length);
    const ids = new Int16Array(positions.length * size);
    const weights = hasWeights ? new Float32Array(ids.length) : null;
    positions.forEach((position, i) => {
      const at = (position - answer.start) * size;
      ids.set(answer.rows.subarray(at, at + size), i * size);
      weights?.set(answer.weights.subarray(at, at + size), i * size);
    });
    sample.tokens.push(...positions.map((position) => answer.tokens[position] ?? { id: null, text: null }));
    sample.addRows(ids, weights);
  }
  return sample;
}

/** The responses that can be shown as one: {name, members} for each folder, and each file of several responses. */
export function groupsIn(answers) {
  const groups = new Map();
  for (const answer of answers) {
    if (!answer.file) continue;
    for (const place of placesOf(answer.file)) groups.set(place, [...(groups.get(place) ?? []), answer]);
  }
  const several = [...groups].filter(([, members]) => members.length > 1 && areOfOneModel(members));
  return several.map(([place, members]) => ({ name: `${place} (${members.length} responses)`, members }));
}

/** A file and its folders: `a/`, `a/b/` and `a/b/c.jsonl`. */
function placesOf(file) {
  const folders = file.split("/").slice(0, -1);
  const places = folders.map((_, i) => `${folders.slice(0, i + 1).join("/")}/`);
  return [...places.filter((place) => place !== "/"), file];
}

function areOfOneModel([first, ...others]) {
  const isLikeFirst = ({ layers, topK, layerIds }) => layers === first.layers && topK === first.topK && String(layerIds) === String(first.layerIds);
  return others.every(isLikeFirst);
}
