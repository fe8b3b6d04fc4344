/* Builds the report: a page that contains all data of a run. */

async function unpack(id) {
  const packed = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot unpack the data; use a browser of 2023 or later");
  }
  const content = await unpack("content");
  byId("title").textContent = content.title;
  byId("facts").replaceChildren(...content.facts.map(([name, value]) =>
    make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value, dir: "auto" }))));
  const run = new Run(content, (at) => unpack(`step-${at}`));
  let steps = null;
  showCurves(content.curves, (step) => {
    steps?.showStep(step);
    byId("rollouts-section").scrollIntoView();
  });
  if (run.groups.length) steps = showRollouts(run);
}

function showRollouts(run) {
  let view = null;
  const refresh = () => view.refresh();
  const steps = new StepRange(run.content.steps.map((one) => one.step), refresh);
  view = new GroupView(new Filters(steps, refresh));
  view.setRun(run);
  tellWhatIsLeftOut(run.content);
  listenToTokens();
  byId("rollouts-section").hidden = false;
  view.refresh();
  return steps;
}

function tellWhatIsLeftOut({ steps, all_steps: allSteps }) {
  const said = [];
  if (steps.length < allSteps) {
    said.push(`To keep the page small, it shows the rollouts of ${steps.length} of ${allSteps} steps, evenly chosen, with the first and the last one. The curves show all steps.`);
  }
  const cut = steps.filter((one) => one.groups.length < one.all_groups).length;
  if (cut) said.push(`In ${counted(cut, "step")} it shows some of the groups, evenly chosen.`);
  byId("left-out").textContent = said.join(" ");
  byId("left-out").hidden = !said.length;
}

start().catch((error) => {
  byId("failure").textContent = `The page cannot show the run: ${error.message}`;
  byId("failure").hidden = false;
  throw error;
});
