// How the page prints: light, whatever the theme is, as ink is dark and paper is not.

/** `redraw` paints at once with the colours that hold now. */
export function watchPrinting(redraw) {
  const root = document.documentElement;
  let theme = null; // of the screen, while the page prints
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    redraw();
  });
  addEventListener("afterprint", () => {
    root.dataset.theme = theme;
    redraw();
  });
}
