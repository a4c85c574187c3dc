// What is shown, in sentences.

import { capital, visible } from "./tokens.js";
import { UNFINISHED } from "./saved.js";
import { loadsByWeight } from "./view.js";

/** A token: its place and text. */
export function describe(answer, position) {
  const { promptLength } = answer;
  const text = answer.text(position);
  const kind = promptLength === null ? "" : position < promptLength ? ", prompt" : ", generated";
  return `Token ${position}${text ? ` “${visible(text)}”` : ""}${kind}`;
}

/** The selected token: of A, where B has another at its position. */
export const describeSelected = ({ a, b, comparison, token }) => (b && !comparison ? "A: " : "") + describe(a, token);

export function summary(answer, name) {
  const { tokens, promptLength, length, counted, missing, layers, topK, experts, finished } = answer;
  const parts = promptLength === null ? `${tokens.length} tokens` : `${promptLength} prompt and ${tokens.length - promptLength} generated tokens`;
  if (answer.isSample) return `${name}${answer.name}, ${counted ?? length} tokens with experts of ${layers} layers × ${topK} of ${experts} experts.`;
  const end = finished === null ? "streaming" : finished === UNFINISHED ? UNFINISHED : `finish reason: ${finished}`;
  return `${name}${parts}, ${length} rows${missing ? ` (${missing} unknown)` : ""} of ${layers} layers × ${topK} of ${experts} experts, ${end}.`;
}

export function cellInWords({ a, b, comparison, token, layer }) {
  const ids = (answer) => answer.cellInWords(token, layer);
  const words = `${describeSelected({ a, b, comparison, token })}; ${a.layerName(layer)}: `;
  if (!comparison) return `${words}${ids(a)}`;
  const others = comparison.at(token, layer);
  return `${words}A ${ids(a)}; B ${ids(b)}${others === null ? "" : ` (${others} differ)`}`;
}

export function loadInWords({ a, b, layer, expert }) {
  const byWeight = loadsByWeight();
  const busiest = (answer) => {
    const loads = Array.from({ length: answer.experts }, (_, i) => answer.load(layer, i, byWeight));
    const most = loads.indexOf(Math.max(...loads));
    const never = loads.filter((_, i) => !answer.count(layer, i)).length;
    const share = `${loads[most].toFixed(1)} × the even share${byWeight ? " by weights" : ""}`;
    return `busiest expert ${most} with ${share}; ${never} of ${answer.experts} experts unused.`;
  };
  const words = `${capital(a.layerName(layer))}: ${b ? `A: ${busiest(a)} B: ${busiest(b)}` : busiest(a)}`;
  return expert === null ? words : `${words} ${expertInWords({ a, b, layer, expert })}`;
}

/** An expert's load in a layer. */
export function expertInWords({ a, b, layer, expert }) {
  const load = (answer) => {
    const sum = answer.sums[layer * answer.experts + expert]?.toFixed(2);
    const weighed = answer.hasWeights ? `; by weights ${answer.load(layer, expert, true).toFixed(2)} × (sum ${sum})` : "";
    return `${answer.load(layer, expert).toFixed(2)} × (${answer.count(layer, expert)} of ${answer.counted ?? answer.length} tokens)${weighed}`;
  };
  return `Expert ${expert}: ${b ? `A ${load(a)}; B ${load(b)}` : load(a)}.`;
}

export const expertTitle = ({ a, layer, expert }) => `${expert === null ? "Experts" : `Expert ${expert}`} of ${a.layerName(layer)}`;
