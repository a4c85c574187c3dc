// Starts the page, and says what its buttons and fields do.

import { send, stop } from "./ask.js";
import { $ } from "./dom.js";
import { loadTable, saveCsv } from "./download.js";
import { experts, frame, load, map, recolour, repaint } from "./drawing.js";
import { savePng, saveSvg } from "./figure.js";
import { droppedFiles, pickedFiles } from "./files.js";
import { watchFinding } from "./find.js";
import { foldHelp } from "./help.js";
import { watchKeys } from "./keys.js";
import { followAddress, followLink, forgetLink, numberIn, writeLink } from "./link.js";
import { notify, say } from "./messages.js";
import { watchPrinting } from "./print.js";
import { isOpened, openExample, openFiles, openProfile, openSaved, pick, save } from "./responses.js";
import { askForKey, connect, setKey } from "./server.js";
import { watchTheme } from "./theme.js";
import { changed, select, view } from "./view.js";
import { cellInWords } from "./words.js";

/** Starts with what the server told the page: that it has files to show, wants a key, or captures nothing. */
async function start() {
  const told = document.documentElement.dataset;
  if (told.saved) await openSaved(JSON.parse(told.saved));
  else if (told.capture !== "off" && told.apiKey) askForKey();
  else if (told.capture !== "off") connect();
  await followLink();
  if (told.capture === "off") notify("This server does not capture routed experts. You can still open saved responses.");
}

const on = (id, kind, act) => $(id).addEventListener(kind, act);

function onSubmit(id, act) {
  on(id, "submit", (event) => {
    event.preventDefault();
    act();
  });
}

const open = (files) => openFiles(files).then(followLink);

onSubmit("key-form", setKey);
onSubmit("request", () => send(forgetLink));
on("request", "keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("request").requestSubmit();
});
for (const id of ["pick-a", "pick-b"]) {
  on(id, "change", async ({ target }) => {
    if (isOpened(target)) forgetLink();
    await pick();
    await followLink();
  });
}
for (const id of ["file", "folder"]) on(id, "change", ({ target }) => open(pickedFiles(target)).then(() => (target.value = "")));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  open(droppedFiles(event.dataTransfer));
});
addEventListener("hashchange", followAddress);

const namesOf = ({ a, b }) => (b ? `A: ${a.name}; B: ${b.name}` : a.name);

const CLICKS = {
  stop,
  save,
  example: () => openExample().then(followLink),
  profile: openProfile,
  go: () => {
    const { position: token, layer } = view.comparison.first;
    select({ token, layer });
    $("text-title").scrollIntoView();
    say(cellInWords(view));
  },
  fit: () => map.setZoom("fit"),
  "save-load": () => saveCsv(...loadTable(view.a), "load.csv"),
  "load-svg": () => saveSvg(load, load.legends(), `Expert load of ${namesOf(view)}`, "load"),
  "load-png": () => savePng(load, load.legends(), "load"),
  "map-svg": () => saveSvg(map, map.legends(), `Tokens by layer of ${namesOf(view)}`, "map"),
  "map-png": () => savePng(map, map.legends(), "map"),
  "save-expert": () => experts.saveCsv("expert.csv"),
  "all-experts": () => select({ layer: view.layer, expert: null }),
};
for (const [id, act] of Object.entries(CLICKS)) on(id, "click", act);

on("expert", "input", () => {
  const expert = numberIn($("expert").value);
  if (view.a) select({ layer: view.layer, expert: expert !== null && expert < view.a.experts ? expert : null });
});
on("mode", "input", () => {
  view.mode = $("mode").value;
  recolour();
});
on("rank", "input", () => {
  view.rank = Math.max(Number($("rank").value) || 1, 1);
  recolour();
});
on("by", "input", () => {
  view.byWeight = $("by").value === "weights";
  recolour();
});
on("columns", "input", () => {
  view.columns = $("columns").value;
  changed();
});
on("zoom", "input", () => map.setZoom(2 ** Number($("zoom").value)));
watchKeys();
watchFinding();
foldHelp();
view.draw = (now) => frame(now, writeLink);
new ResizeObserver(changed).observe($("views"));
watchTheme($("theme"), recolour);
watchPrinting(repaint);
start();
