// Lets a whole answer grow on the page: at once, in slices that leave each frame its time, or as it was made.

import { Answer } from "./answer.js";

const ROWS_A_FRAME = 128;

export class Player {
  /** `whole` is an Answer, or has what one has. */
  constructor(whole) {
    this.whole = whole;
    this.replay(Infinity);
  }

  get isOver() {
    return this.answer.finished !== null;
  }

  /** Shows it, or shows it again, from the end of the prompt on. */
  replay(perSecond) {
    Object.assign(this, { answer: new Answer(this.whole), perSecond, since: null });
    this.answer.promptLength = this.whole.promptLength;
    return this.answer;
  }

  /** Takes what is due by `now`, in milliseconds; whether there will be more. */
  step(now) {
    const { whole, answer } = this;
    this.since ??= now;
    const prompt = whole.promptLength ?? 0;
    const due = prompt + ((now - this.since) / 1000) * this.perSecond;
    const tokens = Math.min(whole.tokens.length, due, answer.end + ROWS_A_FRAME + 1);
    const isLast = tokens >= whole.tokens.length;
    const rows = Math.min(whole.length, isLast ? whole.length : Math.max(Math.floor(tokens) - 1 - whole.start, 0), answer.length + ROWS_A_FRAME);
    for (let i = answer.tokens.length; i < Math.floor(tokens); i++) answer.tokens.push(whole.tokens[i]);
    if (rows > answer.length) {
      const [from, to] = [answer.length * answer.size, rows * answer.size];
      answer.addRows(whole.rows.subarray(from, to), whole.weights?.subarray(from, to));
    }
    if (isLast && rows === whole.length) answer.finished = whole.finished;
    return !this.isOver;
  }
}
