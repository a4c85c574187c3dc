// In which order the load has the experts of each layer: by number, by load, or those beside each other that tokens choose together.

/** The experts of a layer by column, and the column of each. */
export class Order {
  /** `kind` is "number", "load" or "likeness"; `load(answer, layer, expert)` gives what "load" sorts by. */
  constructor(kind, answers, load) {
    this.kind = kind;
    this.experts = Math.max(...answers.map(({ experts }) => experts));
    const numbers = Array.from({ length: this.experts }, (_, expert) => expert);
    this.ofLayer = answers[0].layerIds.map((_, layer) => {
      if (kind === "number") return numbers;
      const loads = numbers.map((expert) => answers.reduce((sum, answer) => sum + load(answer, layer, expert), 0));
      const byLoad = [...numbers].sort((one, other) => loads[other] - loads[one]);
      return kind === "load" ? byLoad : alike(answers, layer, byLoad);
    });
    this.columns = this.ofLayer.map((experts) => {
      const columns = new Uint16Array(experts.length);
      experts.forEach((expert, column) => (columns[expert] = column));
      return columns;
    });
  }

  expertAt(layer, column) {
    return this.ofLayer[layer][column];
  }

  columnOf(layer, expert) {
    return this.columns[layer][expert];
  }
}

/** From the busiest expert on, each followed by that which most of its tokens chose, too, of those that are left. */
function alike(answers, layer, byLoad) {
  const together = chosenTogether(answers, layer, byLoad.length);
  const left = new Set(byLoad);
  const order = [];
  let last = byLoad[0];
  while (left.size) {
    left.delete(last);
    order.push(last);
    last = nearest(together, last, left);
  }
  return order;
}

/** [expert, expert]: how many tokens chose both; in the diagonal, how many chose the expert. */
function chosenTogether(answers, layer, experts) {
  const together = new Uint32Array(experts * experts);
  for (const answer of answers) {
    for (let position = answer.start; position < answer.end; position++) {
      const ids = answer.cell(position, layer);
      if (ids.includes(-1)) continue;
      for (const one of ids) for (const other of ids) together[one * experts + other]++;
    }
  }
  return together;
}

/** The cosine of two experts' tokens is highest for it; of experts without common tokens, the busier one. */
function nearest(together, expert, left) {
  const experts = Math.sqrt(together.length);
  const count = (other) => together[other * experts + other];
  let best;
  let most = -1;
  for (const other of left) {
    const both = together[expert * experts + other];
    const likeness = both && both / Math.sqrt(count(expert) * count(other));
    if (likeness > most) {
      best = other;
      most = likeness;
    }
  }
  return best;
}
