"use strict";
(() => {
  const seconds = Number(document.body.dataset.seconds);
  const updates = document.getElementById("updates");
  const parser = new DOMParser();
  let paused = false;

  const put = (id, fresh) => {
    const old = document.getElementById(id);
    const next = document.importNode(fresh.getElementById(id), true);
    if (old.innerHTML !== next.innerHTML) old.replaceChildren(...next.childNodes);
  };

  // The element that took the place of one that was replaced.
  const twin = (gone) => {
    const label = gone.getAttribute("aria-label");
    if (label) return document.querySelector(`main [aria-label="${CSS.escape(label)}"]`);
    const details = gone.closest("details[id]");
    return details && document.getElementById(details.id)?.querySelector("summary");
  };

  // What the reader has opened, closed and focused stays as it is.
  const replaceMain = (fresh) => {
    const toggled = [...document.querySelectorAll("details[data-toggled]")];
    for (const details of toggled) {
      const next = fresh.getElementById(details.id);
      if (!next) continue;
      next.open = details.open;
      next.dataset.toggled = "";
    }
    const focused = document.activeElement;
    put("main", fresh);
    decorate();
    if (!focused.isConnected) twin(focused)?.focus({ preventScroll: true });
  };

  const copy = async (code, button) => {
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Plain HTTP has no clipboard: the older way needs a selection.
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };

  const decorate = () => {
    for (const code of document.querySelectorAll("ol code.typed:not(:has(+ button))")) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Copy";
      button.setAttribute("aria-label", `Copy ${code.textContent}`);
      button.addEventListener("click", () => copy(code, button));
      code.after(button);
    }
    for (const summary of document.querySelectorAll("summary")) {
      summary.onclick = () => { summary.parentElement.dataset.toggled = ""; };
    }
  };

  const look = async () => {
    if (paused || document.hidden) return;
    if (!getSelection().isCollapsed) {
      notice.textContent = "Waiting while text is selected.";
      return;
    }
    try {
      const answer = await fetch("/", { cache: "no-store", signal: AbortSignal.timeout(seconds * 1000) });
      if (!answer.ok) throw new Error(answer.statusText);
      const fresh = parser.parseFromString(await answer.text(), "text/html");
      document.title = fresh.title;
      document.querySelector("link[rel=icon]").href = fresh.querySelector("link[rel=icon]").href;
      put("seen", fresh);
      put("announced", fresh);
      replaceMain(fresh);
      notice.textContent = "";
    } catch {
      notice.textContent = "kvwatch does not answer: this is the node as it was then.";
    }
  };

  const notice = document.createElement("span");
  notice.className = "unknown";
  notice.setAttribute("role", "status");
  const pause = document.createElement("button");
  pause.type = "button";
  pause.textContent = "Pause updates";
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume updates" : "Pause updates";
    look();
  });
  updates.append(notice, " ", pause);
  decorate();
  setInterval(look, seconds * 1000);
  document.addEventListener("visibilitychange", look);
})();
