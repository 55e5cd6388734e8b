// Light or dark: as the system has it, until the reader chooses.
"use strict";
(() => {
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  document.querySelector("button.theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    root.dataset.theme = isDark ? "light" : "dark";
    root.dispatchEvent(new Event("theme"));
  });
})();
