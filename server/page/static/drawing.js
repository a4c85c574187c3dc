// The parts of the page, and one drawing of them a frame.

import { Busiest, forgetTheme, ink } from "./colours.js";
import { loadsInWords } from "./compare.js";
import { Detail } from "./detail.js";
import { $, write } from "./dom.js";
import { Experts } from "./expert.js";
import { LoadMap } from "./load.js";
import { TokenMap } from "./map.js";
import { colouring, explain, modeOf, needsWeights } from "./modes.js";
import { TokenText } from "./text.js";
import { changed, hasRanks, select, view } from "./view.js";
import { cellInWords, describeSelected, expertTitle, loadInWords, summary } from "./words.js";

export const map = new TokenMap($("map"), view, select);
export const load = new LoadMap($("load"), view, select);
export const experts = new Experts($("experts"), view, select);
const detail = new Detail($("detail"), select);
const texts = ["a", "b"].map((side) => new TokenText($(`tokens-${side}`), side, view, select));

const REST = 60; // milliseconds between two drawings of all but the map, while an answer grows or a key is held
let drawn = 0;

const shown = () => [view.a, view.b].filter(Boolean);

/** Builds the parts anew for the answers that are shown. */
export function build() {
  const { a, b } = view;
  view.busiest = new Busiest(shown());
  texts[0].reset(a);
  if (b) texts[1].reset(b);
  $("side-b").hidden = $("name-a").hidden = !b;
  $("name-a").textContent = `A: ${a.name}`;
  $("name-b").textContent = `B: ${b?.name}`;
  document.body.classList.toggle("two", Boolean(b));
  document.body.classList.toggle("ranked", hasRanks());
  document.body.classList.toggle("counted", a.isProfile);
  $("rank").max = a.topK;
  $("expert").max = a.experts - 1;
  $("views").hidden = false;
  $("empty").hidden = true;
  $("save").disabled = a.isProfile;
  recolour();
}

/** Marks tokens of the first response in the text. */
export function markFound(positions) {
  texts[0].find(new Set(positions));
}

/** Paints with other colours, or colours for something else. */
export function recolour() {
  forgetTheme();
  if (view.a) load.legend($("load-scale"), $("between-scale"), $("by-label"));
  changed();
}

/** The same at once, not in the next frame: a page that is printed has none. */
export function repaint() {
  recolour();
  if (!view.a) return;
  drawn = -Infinity;
  draw(0);
}

/** Draws what has changed; calls `rested` if nothing is left for the next frame. */
export function frame(now, rested) {
  if (!view.a || !$("views").clientWidth) return; // a page that is not laid out is drawn when it is
  compare();
  const wasGrowing = view.growing;
  view.growing = shown().some(({ finished }) => finished === null);
  map.following = !view.isPinned;
  if ((view.growing || wasGrowing) && !view.isPinned) view.token = Math.max(view.a.end - 1, 0);
  view.isPinned ||= !view.growing;
  if (wasGrowing && !view.growing) view.isRevealed = false;
  if (!view.isRevealed) map.reveal(view.token);
  if (draw(now)) changed();
  else rested();
}

/** Compares what came; by load where positions do not have the same tokens. */
function compare() {
  view.comparison?.extend();
  if (!view.comparison?.hasOtherPrompts) return;
  view.parting = `The prompts differ from position ${view.comparison.firstToken}. `;
  view.comparison = null;
}

/** Says what the colours of tokens mean, and which other meanings there are. */
function drawMode() {
  const mode = modeOf(view);
  for (const option of $("mode").options) option.hidden = option.disabled = needsWeights(option.value) && !hasRanks();
  $("mode").value = mode;
  $("rank-label").hidden = mode !== "expert" || !hasRanks();
  document.body.dataset.mode = mode;
  for (const id of ["legend", "text-legend"]) explain($(id), view);
}

/** Colours the tokens by the selected layer, as the map does; those of a selected expert are shaded instead. */
function tintText(text, answer) {
  const { layer, expert, rank, busiest } = view;
  const colourOf = colouring(view);
  const isShaded = expert !== null;
  const shows = [modeOf(view), layer, rank, isShaded, expert, busiest.number, busiest.colour(0, 0), ink("surface")].join();
  const isKnown = (position) => position >= answer.start && position < answer.end;
  text.tint(shows, (position) => (isShaded || !isKnown(position) ? 0 : colourOf(answer, layer, position, position + 1)));
}

/** Draws everything; whether some is left for the next frame. */
function draw(now) {
  const { a, b, comparison, token } = view;
  map.draw();
  if (now - drawn < REST) return true;
  drawn = now;
  const rows = shown().reduce((sum, { length }) => sum + length, 0);
  if (rows > view.busiest.rows * (view.growing ? 1.1 : 1)) view.busiest = new Busiest(shown());
  map.legend($("differ-scale"));
  drawMode();
  load.draw();
  detail.draw(view);
  experts.draw();
  [a, b].forEach((answer, i) => {
    if (!answer) return;
    const isStreaming = answer.finished === null && !view.isPinned;
    texts[i].draw(i && !comparison ? null : token, { isStreaming, firstToken: comparison?.firstToken ?? null });
    texts[i].highlight(view.layer, view.expert);
    tintText(texts[i], answer);
    if (!view.isRevealed && (!i || comparison)) texts[i].reveal(token);
  });
  view.isRevealed = true;
  write("summary", summary(a, b ? "A: " : "") + (b ? ` ${summary(b, "B: ")}` : ""));
  $("parting").hidden = !b;
  if (b) {
    write("parting-text", comparison ? comparison.sentence() : view.parting + loadsInWords(a, b));
    $("go").hidden = !comparison?.first;
  }
  write("map-status", cellInWords(view));
  write("detail-token", describeSelected(view));
  write("load-status", loadInWords(view));
  write("expert-title", expertTitle(view));
  if (document.activeElement !== $("expert")) $("expert").value = view.expert ?? "";
  return false;
}
