// How far apart loads would be by chance.

const DEALS = 200;
const MOST_CHOICES = 4e7; // that are counted for all deals together

/** A generator of numbers from 0 to 1 that gives the same ones for the same responses (mulberry32). */
function randomNumbers() {
  let state = 1;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Some of a list, drawn at random: they are put in front. */
function draw(list, count, random) {
  for (let i = 0; i < count; i++) {
    const other = i + Math.floor(random() * (list.length - i));
    [list[i], list[other]] = [list[other], list[i]];
  }
  return list.slice(0, count);
}

/** Counts of experts by layer, that are added up. */
class Counts {
  constructor(layers, experts) {
    this.layers = layers;
    this.experts = experts;
    this.counts = new Float64Array(layers * experts);
    this.slots = new Float64Array(layers);
  }

  /** Adds all of an answer. */
  add(answer) {
    for (let layer = 0; layer < this.layers; layer++) {
      this.slots[layer] += answer.slots[layer];
      for (let expert = 0; expert < answer.experts; expert++) this.counts[layer * this.experts + expert] += answer.count(layer, expert);
    }
  }

  /** Adds a token of an answer. */
  addToken(answer, position) {
    for (let layer = 0; layer < this.layers; layer++) {
      for (const id of answer.cell(position, layer)) {
        if (id < 0) continue;
        this.slots[layer]++;
        this.counts[layer * this.experts + id]++;
      }
    }
  }
}

/**
 * The distance of two answers if chance had made them: {mean, most}, below `most` in 95 % of the deals. Two groups have
 * their responses dealt to them at random, two responses their tokens; as many tokens as a part of a response has are drawn
 * from the whole. Null where nothing can be dealt.
 */
export function byChance(a, b, distance) {
  const deal = dealOf(a, b);
  if (!deal) return null;
  const distances = Array.from({ length: deal.times }, () => distance(...deal.once())).sort((one, other) => one - other);
  const mean = distances.reduce((sum, one) => sum + one, 0) / distances.length;
  return { mean, most: distances[Math.ceil(0.95 * distances.length) - 1] };
}

function dealOf(a, b) {
  if (b.whole === a) return dealOfTokens(a, b);
  if (a.members && b.members) return a.members.some((member) => b.members.includes(member)) ? null : dealOfResponses(a, b);
  const areWhole = [a, b].every(({ isSample, finished }) => !isSample && finished !== null);
  return areWhole ? dealOfBoth(a, b) : null;
}

function dealOfResponses(a, b) {
  const all = [...a.members, ...b.members];
  const experts = Math.max(a.experts, b.experts);
  const random = randomNumbers();
  const countsOf = (answers) => {
    const counts = new Counts(a.layers, experts);
    for (const answer of answers) counts.add(answer);
    return counts;
  };
  const once = () => {
    const first = draw(all, a.members.length, random);
    return [countsOf(first), countsOf(all.slice(first.length))];
  };
  return { once, times: timesFor(all.length * a.layers * experts) };
}

function dealOfBoth(a, b) {
  const tokens = [a, b].flatMap((answer) => Array.from({ length: answer.length }, (_, row) => ({ answer, position: answer.start + row })));
  const experts = Math.max(a.experts, b.experts);
  const random = randomNumbers();
  const countsOf = (some) => {
    const counts = new Counts(a.layers, experts);
    for (const { answer, position } of some) counts.addToken(answer, position);
    return counts;
  };
  const once = () => {
    const first = draw(tokens, a.length, random);
    return [countsOf(first), countsOf(tokens.slice(first.length))];
  };
  return { once, times: timesFor(tokens.length * a.size) };
}

function dealOfTokens(a, b) {
  const positions = Array.from({ length: a.length }, (_, row) => a.start + row);
  const random = randomNumbers();
  const once = () => {
    const counts = new Counts(a.layers, a.experts);
    for (const position of draw(positions, b.length, random)) counts.addToken(a, position);
    return [a, counts];
  };
  return { once, times: timesFor(b.length * a.size) };
}

const timesFor = (choices) => Math.min(Math.max(Math.floor(MOST_CHOICES / choices), 20), DEALS);
