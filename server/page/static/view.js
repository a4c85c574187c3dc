// What is shown, and what of it is selected.

export const view = {
  a: null,
  b: null,
  comparison: null, // by position, of answers to one prompt; else loads are compared
  parting: "", // why not by position
  token: 0,
  layer: 0,
  expert: null,
  mode: null, // what colours of tokens mean (modes.js); null: as the responses have it
  rank: 1, // of the choice whose expert has a colour, where there are weights
  columns: "number", // how the load orders the experts of each layer (order.js)
  byWeight: false, // what the load adds up, where there are weights
  busiest: null, // which experts have a colour
  growing: false,
  request: null, // the AbortController of the one under way
  isPinned: false, // whether a token was selected by hand while the answer grows
  isRevealed: true, // whether the selected token was brought into sight
  draw: null, // a function
  changed,
};

/** Whether all answers that are shown have weights, so that their choices have ranks. */
export const hasRanks = () => [view.a, view.b].every((answer) => !answer || answer.hasWeights);

/** Whether loads are those of weights. */
export const loadsByWeight = () => view.byWeight && hasRanks();

let isScheduled = false;

/** Has the view drawn, once a frame of the browser. */
export function changed() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame((now) => {
    isScheduled = false;
    view.draw(now);
  });
}

/** Selects what there is: the nearest token and layer of the answers that are shown. */
export function stayWithin() {
  const last = Math.max(view.a.tokens.length, view.a.end, view.b?.end ?? 0) - 1;
  view.token = Math.min(Math.max(view.token, 0), Math.max(last, 0));
  view.layer = Math.min(Math.max(view.layer, 0), view.a.layers - 1);
}

/** Selects a token, a layer, an expert of it: those that are given. */
export function select(cell) {
  if (!view.a) return;
  if (cell.token !== undefined) view.isPinned = true;
  if (cell.layer !== undefined && cell.expert === undefined && cell.layer !== view.layer) view.expert = null;
  Object.assign(view, cell);
  stayWithin();
  view.isRevealed = false;
  changed();
}
