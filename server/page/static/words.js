// What is shown, in sentences.

import { capital, visible } from "./tokens.js";
import { UNFINISHED } from "./saved.js";

/** A token: its place and text. */
export function describe(answer, position) {
  const { promptLength } = answer;
  const text = answer.text(position);
  const kind = promptLength === null ? "" : position < promptLength ? ", prompt" : ", generated";
  return `Token ${position}${text ? ` “${visible(text)}”` : ""}${kind}`;
}

export function summary(answer, name) {
  const { tokens, promptLength, length, missing, layers, topK, experts, finished } = answer;
  const parts = promptLength === null ? `${tokens.length} tokens` : `${promptLength} prompt and ${tokens.length - promptLength} generated tokens`;
  const end = finished === null ? "streaming" : finished === UNFINISHED ? UNFINISHED : `finish reason: ${finished}`;
  return `${name}${parts}, ${length} rows${missing ? ` (${missing} unknown)` : ""} of ${layers} layers × ${topK} of ${experts} experts, ${end}.`;
}

export function cellInWords({ a, b, comparison, token, layer }) {
  const ids = (answer) => answer.cellInWords(token, layer);
  const words = `${describe(a, token)}; ${a.layerName(layer)}: `;
  if (!comparison) return `${words}${ids(a)}`;
  const others = comparison.at(token, layer);
  return `${words}A ${ids(a)}; B ${ids(b)}${others === null ? "" : ` (${others} differ)`}`;
}

export function loadInWords({ a, layer, expert, byWeight }) {
  const isByWeight = byWeight && a.hasWeights;
  const loads = Array.from({ length: a.experts }, (_, i) => a.load(layer, i, isByWeight));
  const most = loads.indexOf(Math.max(...loads));
  const place = layer * a.experts;
  const never = a.counts.subarray(place, place + a.experts).filter((count) => !count).length;
  const share = `${loads[most].toFixed(1)} × the even share${isByWeight ? " by weights" : ""}`;
  const words = `${capital(a.layerName(layer))}: busiest expert ${most} with ${share}; ${never} of ${a.experts} experts unused.`;
  if (expert === null) return words;
  const weighed = a.hasWeights ? `; by weights ${a.load(layer, expert, true).toFixed(2)} × (sum ${a.sums[place + expert].toFixed(2)})` : "";
  return `${words} Expert ${expert}: ${a.load(layer, expert).toFixed(2)} × (${a.counts[place + expert]} tokens)${weighed}.`;
}

export function expertInWords({ a, b, layer, expert }) {
  const name = capital(a.layerName(layer));
  if (expert === null) return `${name}: click an expert, or enter its number, to see its tokens.`;
  const count = (answer) => (expert < answer.experts ? answer.counts[layer * answer.experts + expert] : 0);
  return `${name}, expert ${expert}: ${count(a)} of ${a.length} tokens${b ? `; in B ${count(b)} of ${b.length}` : ""}.`;
}
