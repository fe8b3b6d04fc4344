/* Talks to the service: requests, and the events of the chosen runs. */

const RETRY_MS = 2000;

/** There is no answer. */
class ServiceAway extends Error {}

/** Returns the JSON of an address below `api/`. Raises ServiceAway, or an Error with the service's reason. */
async function ask(path) {
  const answer = await fetch(`api/${path}`).catch((error) => {
    throw new ServiceAway(error.message);
  });
  if (answer.ok) return answer.json();
  const { detail } = await answer.json().catch(() => ({}));
  throw new Error(typeof detail === "string" ? detail : `${path}: HTTP ${answer.status}`);
}

const pathOf = (run) => `runs/${encodeURIComponent(run)}`;
const queryOf = (runs) => runs.map((run) => `run=${encodeURIComponent(run)}`).join("&");

/** The events of the chosen runs. Connects again, until it succeeds, if the service is away. */
class Events {
  /** Args: on: functions by the name of the event, which get its data; and `lost` and `connected` */
  constructor(on) {
    this.on = on;
    this._runs = [];
    this._source = null;
    this._waiting = 0;
  }

  choose(runs) {
    this._runs = runs;
    this._open();
  }

  _open() {
    clearTimeout(this._waiting);
    this._source?.close();
    if (!this._runs.length) return;
    const source = new EventSource(`api/events?${queryOf(this._runs)}`);
    this._source = source;
    source.addEventListener("open", () => this.on.connected());
    source.addEventListener("error", () => {
      source.close();
      this.on.lost();
      this._waiting = setTimeout(() => this._open(), RETRY_MS);
    });
    for (const name of ["state", "points", "evaluations"]) {
      source.addEventListener(name, (event) => this.on[name](JSON.parse(event.data)));
    }
  }
}
