// Copy buttons: data-copies names the element whose text goes to the clipboard.
"use strict";
(() => {
  // For a page opened where the browser gives scripts no clipboard.
  function copySelected(source) {
    const selection = window.getSelection();
    selection.removeAllRanges();
    const range = document.createRange();
    range.selectNodeContents(source);
    selection.addRange(range);
    const done = document.execCommand("copy");
    selection.removeAllRanges();
    return done;
  }

  async function copy(source) {
    try {
      await navigator.clipboard.writeText(source.textContent);
      return true;
    } catch {
      return copySelected(source);
    }
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const done = await copy(document.getElementById(button.dataset.copies));
    button.textContent = done ? "Copied" : "Select and copy by hand";
    button.setAttribute("aria-live", "polite");
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
})();
