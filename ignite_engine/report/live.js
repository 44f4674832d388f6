
// The live page: fetches what has changed, and asks the run for what its buttons say.
const places = [...document.querySelectorAll("[data-part]")];
const buttons = [...document.querySelectorAll("[data-ask]")];
const said = document.querySelector("[data-said]");
let version = 0, pressed = false, stale = false, asked = {};

addEventListener("pointerdown", () => { pressed = true; }, true);
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { pressed = false; if (stale) { stale = false; later(); } }, true);

const put = (place, html) => {
  const title = details => details.firstElementChild?.textContent;
  const open = new Set([...place.querySelectorAll("details[open]")].map(title));
  place.innerHTML = html;
  for (const details of place.querySelectorAll("details")) if (open.has(title(details))) details.open = true;
  sliders(place);
};
const fill = (select, titles) => {
  const chosen = select.value, shown = [...select.options].slice(1).map(option => option.value);
  if (shown.join("\n") === titles.join("\n")) return;
  select.replaceChildren(select.options[0], ...titles.map(title => new Option(title, title)));
  select.value = titles.includes(chosen) ? chosen : "";
};
const show = data => {
  for (const place of places) if (data.parts[place.dataset.part] != null) put(place, data.parts[place.dataset.part]);
  charts = data.charts;
  runs = data.runs;
  figures = [...document.querySelectorAll("figure[data-chart]")];
  fill(control("chart"), charts.map(chart => chart.title));
  document.querySelector("[data-folded]").hidden = !data.has_folded;
  for (const button of buttons) button.disabled = !data.may_ask;
  if (pressed) stale = true; else later();
};
const say = waiting => {
  for (const name of Object.keys(asked)) if (!waiting.includes(name)) { asked[name].done = true; }
  const words = Object.entries(asked).map(([name, at]) => at.done ? `${name}: taken` : `${name}: asked ${Math.round((Date.now() - at.since) / 1000)} s ago, not taken yet`);
  said.textContent = words.join("; ");
};
const poll = async () => {
  try {
    const answer = await fetch(`data?since=${version}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const data = await answer.json();
    if (data.parts) show(data);
    version = data.version;
    say(data.requests);
    document.body.classList.remove("offline");
  } catch (error) {
    const told = error.constructor === Error && error.message; // by the server: the run's folder is gone
    said.textContent = told || "The page's server has ended, or cannot be reached; the run does not depend on it.";
    document.body.classList.add("offline");
  }
  setTimeout(poll, document.hidden ? 10000 : 1000);
};
for (const button of buttons) button.addEventListener("click", async () => {
  const name = button.dataset.ask;
  if (name === "stop" && !confirm("Stop this run? It is saved, and the same command resumes it.")) return;
  const answer = await fetch(name, { method: "POST" }).catch(() => null);
  if (answer?.ok) asked[name] = { since: Date.now(), done: false };
  said.textContent = answer?.ok ? `${name}: asked` : answer ? await answer.text() : "The page's server cannot be reached.";
});
poll();
