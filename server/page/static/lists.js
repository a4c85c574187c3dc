// Lists of layers, experts, tokens and responses, and of the tokens of an expert: what their columns are.

import { quoted } from "./download.js";
import { Rarity } from "./rarity.js";
import { SortedTable, made } from "./sorted.js";
import { balanceOf, distance, mean, tallyOf, tokensOf } from "./stats.js";
import { flat, visible, weightText } from "./tokens.js";

const AROUND = 4; // tokens before and after one
const percent = (value) => (value === null ? "" : `${(100 * value).toFixed(1)} %`);
const times = (value) => `${value.toFixed(2)} ×`;

/** The columns of a token with those around it: row = {answer, position}. */
function tokenColumns(isGroup) {
  const here = ({ answer, position }) => answer.origin(position);
  const columns = [
    { key: "position", title: "Position", value: ({ position }) => position, text: (row) => String(here(row).position), csv: (row) => here(row).position, rises: true },
    { key: "token", title: "Token in its context", value: ({ answer, position }) => answer.text(position), text: contextOf, rises: true, names: ["token", "token_id"], csv: ({ answer, position }) => [quoted(answer.text(position)), answer.tokens[position]?.id] },
  ];
  if (isGroup) columns.push({ key: "response", title: "Response", value: (row) => here(row).name, rises: true });
  return columns;
}

function contextOf({ answer, position }) {
  const { from, to } = answer.origin(position);
  const around = (first, end) => {
    let words = "";
    for (let i = Math.max(first, from); i < Math.min(end, to); i++) words += flat(answer.text(i));
    return words;
  };
  return [around(position - AROUND, position), made("mark", {}, visible(answer.text(position))), around(position + 1, position + 1 + AROUND)];
}

/** Each list: its columns and rows for what is shown, what a row selects, and which rows are selected. */
const LISTS = {
  layers: ({ a, b, pick }) => ({
    sort: "layer",
    rows: a.layerIds.map((_, layer) => ({ layer, ...busiestOf(a, layer) })),
    columns: [
      { key: "layer", title: a.knowsLayers ? "Decoder layer" : "MoE layer", value: ({ layer }) => layer, text: ({ layer }) => String(a.layerIds[layer]), csv: ({ layer }) => a.layerIds[layer], rises: true },
      { key: "balance", title: "Balance", value: ({ layer }) => balanceOf(a, layer), text: ({ layer }) => percent(balanceOf(a, layer)), rises: true },
      { key: "busiest_expert", title: "Busiest expert", value: ({ expert }) => expert, rises: true },
      { key: "load", title: "Its load", value: ({ load }) => load, text: ({ load }) => times(load) },
      { key: "unused", title: "Unused experts", value: ({ unused }) => unused },
      ...(b ? [
        { key: "balance_b", title: "Balance of B", value: ({ layer }) => balanceOf(b, layer), text: ({ layer }) => percent(balanceOf(b, layer)), rises: true },
        { key: "distance", title: "A to B", value: ({ layer }) => distance(a, b, layer), text: ({ layer }) => percent(distance(a, b, layer)) },
      ] : []),
    ],
    pick: ({ layer }) => pick({ layer }),
    isSelected: (view) => (row) => row.layer === view.layer,
  }),

  experts: ({ a, b, layer, allLayers, pick }) => ({
    sort: "-load",
    rows: (allLayers ? a.layerIds.map((_, i) => i) : [layer]).flatMap((layer) => Array.from({ length: a.experts }, (_, expert) => ({ layer, expert }))),
    columns: [
      { key: "expert", title: "Expert", value: ({ expert }) => expert, rises: true },
      { key: "layer", title: "Layer", value: ({ layer }) => layer, text: ({ layer }) => String(a.layerIds[layer]), csv: ({ layer }) => a.layerIds[layer], rises: true },
      { key: "tokens", title: "Tokens", value: ({ layer, expert }) => a.counts[layer * a.experts + expert] },
      { key: "load", title: "Load", value: ({ layer, expert }) => a.load(layer, expert), text: ({ layer, expert }) => times(a.load(layer, expert)) },
      ...(a.hasWeights ? [{ key: "load_by_weights", title: "By weights", value: ({ layer, expert }) => a.load(layer, expert, true), text: ({ layer, expert }) => times(a.load(layer, expert, true)) }] : []),
      ...(b && b.experts === a.experts ? [
        { key: "load_b", title: "Load in B", value: ({ layer, expert }) => b.load(layer, expert), text: ({ layer, expert }) => times(b.load(layer, expert)) },
        { key: "difference", title: "A minus B", value: ({ layer, expert }) => a.load(layer, expert) - b.load(layer, expert), digits: 2 },
      ] : []),
    ],
    pick: ({ layer, expert }) => pick({ layer, expert }),
    isSelected: (view) => (row) => row.layer === view.layer && row.expert === view.expert,
  }),

  tokens: ({ a, pick }) => {
    const rarity = new Rarity(a);
    return {
      sort: "-rarity",
      rows: Array.from({ length: a.length }, (_, i) => ({ answer: a, position: a.start + i, bits: rarity.bitsOfToken(a.start + i) })),
      columns: [...tokenColumns(a.parts), { key: "rarity", title: "Rarity", value: ({ bits }) => bits, digits: 2 }],
      pick: ({ position }) => pick({ token: position }),
      isSelected: (view) => (row) => row.position === view.token,
    };
  },

  responses: ({ a, entries, beside }) => ({
    sort: "response",
    rows: entries.map((entry, place) => responseOf(entry, place, a)),
    columns: [
      { key: "response", title: "Response or group", value: ({ name }) => name, rises: true },
      { key: "rows", title: "Rows", value: ({ rows }) => rows },
      { key: "balance", title: "Balance", value: ({ balance }) => balance, text: ({ balance }) => percent(balance), rises: true },
      { key: "distance", title: "Load differs from A", value: ({ distance }) => distance, text: ({ distance }) => percent(distance) },
    ],
    pick: ({ place }) => beside(place),
    isSelected: (view) => (row) => row.answer === view.a || row.answer === view.b,
  }),
};

function busiestOf(answer, layer) {
  const counts = answer.counts.subarray(layer * answer.experts, (layer + 1) * answer.experts);
  const expert = counts.indexOf(Math.max(...counts));
  return { expert, load: answer.load(layer, expert), unused: counts.filter((count) => !count).length };
}

/** A response in numbers; its tally is made once, unless it still grows. */
function responseOf(entry, place, a) {
  const { answer } = entry;
  const whole = entry.player?.whole;
  const tally = whole ? (entry.tally ??= tallyOf(whole, answer.experts)) : answer;
  const layers = Array.from({ length: answer.layers }, (_, i) => i);
  const isAlike = answer.layers === a.layers && answer.topK === a.topK;
  return {
    ...{ place, answer, name: answer.name, rows: whole ? whole.rows.length / answer.size : answer.length },
    balance: mean(layers.map((layer) => balanceOf(tally, layer))),
    distance: isAlike ? mean(layers.map((layer) => distance(a, tally, layer))) : null,
  };
}

/** The list that is chosen, anew whenever something that it shows has changed. */
export class Lists {
  /** `select` as everywhere; `beside(place)` shows a response beside the one that is shown. */
  constructor(element, view, select, beside) {
    Object.assign(this, { view, select, beside });
    this.table = new SortedTable(element, "List", view, () => view.list, (row) => this.list.pick(row));
  }

  draw() {
    const { view } = this;
    const { a, b, layer, expert, token, list, allLayers, entries } = view;
    const [byLayer, isOfAll] = [list === "experts", list === "responses"];
    const what = [list, a.name, b?.name, byLayer && (allLayers || layer), isOfAll && entries.length].join();
    const shows = [what, a.length, b?.length, view.sorts[list]].join();
    const cell = [layer, expert, token].join();
    if (shows !== this.shows || a !== this.of) {
      this.list = LISTS[list]({ ...view, pick: this.select, beside: this.beside });
      this.table.show(this.list.columns, this.list.rows, view.sorts[list] ?? this.list.sort, what);
    } else if (cell === this.cell) return;
    this.table.mark(this.list.isSelected(view), cell !== this.cell);
    Object.assign(this, { shows, of: a, cell });
  }
}

/** The tokens of the selected expert, of both answers. */
export class ExpertTokens {
  constructor(element, view, select) {
    this.view = view;
    const pick = ({ answer, position }) => (answer === view.a || view.comparison) && select({ token: position });
    this.table = new SortedTable(element, "Tokens of the selected expert", view, () => "expert", pick);
  }

  draw() {
    const { a, b, layer, expert, token, sorts } = this.view;
    const what = [a.name, b?.name, layer, expert].join();
    const shows = [what, a.length, b?.length, sorts.expert].join();
    if (shows !== this.shows || a !== this.of) this.#build(what);
    else if (token === this.token) return;
    this.table.mark((row) => row.position === token && (row.answer === a || this.view.comparison), token !== this.token);
    Object.assign(this, { shows, of: a, token });
  }

  #build(what) {
    const { a, b, layer, expert, sorts } = this.view;
    const sides = [a, ...(b ? [b] : [])];
    const rows = expert === null ? [] : sides.flatMap((answer) => tokensOf(answer, layer, expert).map((row) => ({ answer, ...row })));
    const columns = tokenColumns(sides.some(({ parts }) => parts));
    columns.push({ key: "choice", title: "Rank", value: ({ choice }) => choice, rises: true });
    if (sides.some(({ hasWeights }) => hasWeights)) columns.push({ key: "weight", title: "Weight", value: ({ weight }) => weight, text: ({ weight }) => (Number.isNaN(weight) ? "" : weightText(weight)) });
    if (b) columns.push({ key: "side", title: "In", value: ({ answer }) => (answer === a ? "A" : "B"), rises: true });
    this.table.show(columns, rows, sorts.expert ?? (a.hasWeights ? "-weight" : "choice"), what);
  }
}
