// How to read the figures: open at the first visit, folded from the second on.

const KEY = "routed-experts-visited";

/** Folds what explains figures, unless this browser shows the page for the first time. */
export function foldHelp() {
  if (!isFirstVisit()) for (const help of document.querySelectorAll("details.how")) help.open = false;
}

function isFirstVisit() {
  try {
    const isFirst = localStorage.getItem(KEY) === null;
    localStorage.setItem(KEY, "");
    return isFirst;
  } catch {
    return true; // the browser stores nothing
  }
}
