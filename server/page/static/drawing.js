// The parts of the page, and one drawing of them a frame.

import { forgetTheme } from "./colours.js";
import { loadsInWords } from "./compare.js";
import { Detail } from "./detail.js";
import { $, write } from "./dom.js";
import { ExpertTokens } from "./expert.js";
import { LoadMap } from "./load.js";
import { TokenMap } from "./map.js";
import { MapTable } from "./table.js";
import { TokenText } from "./text.js";
import { changed, players, select, view } from "./view.js";
import { cellInWords, describe, expertInWords, loadInWords, summary } from "./words.js";

export const map = new TokenMap($("map"), view, select);
export const load = new LoadMap($("load"), view, select);
export const expertTokens = new ExpertTokens($("expert-tokens"), view, select);
const detail = new Detail($("detail"), select);
const table = new MapTable($("table"), view);
const texts = [new TokenText($("tokens-a"), "a", select), new TokenText($("tokens-b"), "b", select)];

const REST = 60; // milliseconds between two drawings of all but the map, while an answer grows
let drawn = 0;

/** Builds the parts anew for the answers that are shown. */
export function build() {
  const { a, b } = view;
  texts[0].reset(a);
  if (b) texts[1].reset(b);
  $("side-b").hidden = $("name-a").hidden = !b;
  $("name-a").textContent = `A: ${a.name}`;
  $("name-b").textContent = `B: ${b?.name}`;
  document.body.classList.toggle("two", Boolean(b));
  buildDetail();
  $("rank").max = a.topK;
  $("expert").max = a.experts - 1;
  $("views").hidden = false;
  $("empty").hidden = true;
  for (const id of ["save", "play", "link"]) $(id).disabled = false;
  recolour();
  table.show(view.token);
}

const buildDetail = () => detail.build({ ...view, b: view.comparison && view.b });

/** Paints with other colours, or colours for something else. */
export function recolour() {
  forgetTheme();
  if (view.a) {
    map.legend($("legend"), $("legend-text"), $("legend-b"));
    load.legend($("load-legend"), $("load-legend-text"), $("by-label"));
  }
  changed();
}

/** Draws what has changed; calls `rested` if nothing is left for the next frame. */
export function frame(now, rested) {
  if (!view.a || !$("views").clientWidth) return; // a page that is not laid out is drawn when it is
  const more = grow(now);
  const wasGrowing = view.growing;
  view.growing = [view.a, view.b].some((answer) => answer && answer.finished === null);
  map.following = !view.isPinned;
  if ((view.growing || wasGrowing) && !view.isPinned) view.token = Math.max(view.a.end - 1, 0);
  view.isPinned ||= !view.growing;
  if (!view.isRevealed || (wasGrowing && !view.growing)) reveal();
  if (draw(now) || more) changed();
  else rested();
}

/** Takes what came of the answers and their comparison; whether more will come. */
function grow(now) {
  const playing = players().filter((player) => player.step(now));
  const more = view.comparison?.extend();
  if (view.comparison?.hasOtherPrompts) {
    // Positions do not have the same tokens: loads are compared.
    view.parting = `The prompts differ from position ${view.comparison.firstToken}. `;
    view.comparison = null;
    buildDetail();
    recolour();
  }
  return more || playing.length > 0;
}

/** Brings the selected token into sight. */
function reveal() {
  view.isRevealed = true;
  map.reveal(view.token);
  texts[0].reveal(view.token);
  if (view.comparison) texts[1].reveal(view.token);
  table.show(view.token);
}

/** Draws everything; whether some is left for the next frame. */
function draw(now) {
  const { a, b, comparison, token } = view;
  map.draw();
  write("map-status", cellInWords({ ...view, ...map.hover }));
  if (view.growing && now - drawn < REST) return true;
  drawn = now;
  load.draw();
  detail.draw({ ...view, b: comparison && b });
  expertTokens.draw();
  const firstToken = comparison?.firstToken ?? null;
  [a, b].forEach((answer, i) => {
    if (!answer) return;
    const isStreaming = answer.finished === null && !view.isPinned;
    texts[i].draw(i && !comparison ? null : token, { isStreaming, firstToken });
    texts[i].highlight(view.layer, view.expert);
  });
  write("summary", summary(a, b ? "A: " : "") + (b ? ` ${summary(b, "B: ")}` : ""));
  $("parting").hidden = !b;
  if (b) {
    write("parting-text", comparison ? comparison.sentence() : view.parting + loadsInWords(a, b));
    $("go").hidden = !comparison?.first;
  }
  write("detail-token", describe(a, token));
  write("load-status", loadInWords(view));
  write("expert-status", expertInWords(view));
  if (document.activeElement !== $("expert")) $("expert").value = view.expert ?? "";
  $("stop").disabled = !view.request && !players().length;
  return false;
}
