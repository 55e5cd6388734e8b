// One tooltip for the whole page: the definition of a term (data-def names its entry in the glossary) or the reason that
// stands, hidden, inside an absent value. Shown on hover and on keyboard focus, hidden by Escape.
"use strict";
(() => {
  const tip = document.getElementById("tooltip");
  const EXPLAINED = "[data-def], .absent, .qualified";

  function textFor(element) {
    if (element.dataset.def) return document.getElementById(`def-${element.dataset.def}`).textContent;
    return element.querySelector(".sr").textContent.trim().replace(/^\((.*)\)$/s, "$1");
  }

  function show(element) {
    tip.textContent = textFor(element);
    tip.hidden = false;
    const box = element.getBoundingClientRect();
    const margin = 8;
    const left = Math.min(Math.max(box.left, margin), document.documentElement.clientWidth - tip.offsetWidth - margin);
    const below = box.bottom + margin;
    const fits = below + tip.offsetHeight <= window.innerHeight;
    tip.style.left = `${Math.max(left, margin)}px`;
    tip.style.top = `${fits ? below : Math.max(box.top - tip.offsetHeight - margin, margin)}px`;
  }

  function hide() {
    tip.hidden = true;
  }

  const explained = (event) => event.target instanceof Element && event.target.closest(EXPLAINED);
  document.addEventListener("mouseover", (event) => (explained(event) ? show(explained(event)) : hide()));
  document.addEventListener("focusin", (event) => (explained(event) ? show(explained(event)) : hide()));
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
})();
