/* Builds the page. */

async function start() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot unpack the data; use a browser of 2023 or later");
  }
  const content = await unpack("content");
  byId("title").textContent = content.title;
  byId("facts").replaceChildren(...content.facts.map(([name, value]) =>
    make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value, dir: "auto" }))));
  const run = describe(new Run(content));
  let filters = null;
  showCurves(content.curves, (step) => {
    filters?.showStep(step);
    byId("rollouts-section").scrollIntoView();
  });
  if (run.groups.length) filters = showRollouts(run);
}

function showRollouts(run) {
  let view = null;
  const filters = new Filters(run, () => view.refresh());
  view = new GroupView(run, filters);
  tellWhatIsLeftOut(run.content);
  listenToTokens();
  byId("rollouts-section").hidden = false;
  view.refresh();
  return filters;
}

/** Adds what colours depend on. */
function describe(run) {
  const sequences = run.groups.flatMap((group) => group.sequences);
  const scores = sequences.map(([score]) => score).filter((score) => score !== null);
  run.rewardRange = [smallest(scores), -smallest(scores.map((score) => -score))];
  run.largestAdvantage = -smallest(sequences.map(([, advantage]) => -Math.abs(advantage ?? 0)));
  return Object.assign(run, { hasServer: run.content.has_server, hasTrainer: run.content.has_trainer });
}

const smallest = (values) => values.reduce((least, value) => Math.min(least, value), Infinity);

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
