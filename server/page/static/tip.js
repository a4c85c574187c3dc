// What is under the pointer, in a box beside it.

import { $ } from "./dom.js";

const AWAY = 14; // pixels from the pointer
const tip = $("tip");

const hideTip = () => (tip.hidden = true);

/** While the mouse is over an element, or after a tap, shows the list of elements that `content(event)` gives, if any. */
export function watchPointer(element, content) {
  element.addEventListener("mousemove", (event) => {
    const found = event.buttons ? null : content(event);
    tip.hidden = !found;
    if (!found) return;
    tip.replaceChildren(...found);
    place(event);
  });
  element.addEventListener("mouseleave", hideTip);
}

/** Beside the pointer, where there is room in the window. */
function place({ clientX: x, clientY: y }) {
  const { offsetWidth: width, offsetHeight: height } = tip;
  const { clientWidth, clientHeight } = document.documentElement;
  const left = x + AWAY + width < clientWidth ? x + AWAY : Math.max(x - AWAY - width, 4);
  const top = y + AWAY + height < clientHeight ? y + AWAY : Math.max(y - AWAY - height, 4);
  Object.assign(tip.style, { left: `${left}px`, top: `${top}px` });
}

addEventListener("scroll", hideTip);
addEventListener("keydown", hideTip);
