"use strict";

/* The data of a run. Texts of a run enter the document only as text nodes, never as HTML. */

const LOGPROB_STEPS = 10000; // logprobs are integers in units of 1e-4 nats
const DIFFERENCE_STEPS = 100000; // differences of logprobs in units of 1e-5 nats

/** Element with properties and children. Strings become text nodes. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);

/** Rows of a description list. Args: facts: names and texts */
const factRows = (facts) => facts.map(([name, value]) =>
  make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value, dir: "auto" })));

const MINUS = "\u2212";

/** A number as people read it: at most `digits` significant digits, a real minus sign. */
function shown(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const short = (size && size < 1e-3) || size >= 1e6;
  const text = short ? value.toExponential(digits - 1) : String(Number(value.toPrecision(Math.max(digits, 1 + Math.floor(Math.log10(size || 1))))));
  return text.replaceAll("-", MINUS);
}

const signed = (value) => (value > 0 ? "+" : "") + shown(value);

/** The rollouts of a run: its content, and the details of steps, which are loaded when they are shown. */
class Run {
  /** Args:
   *   content: the steps with summaries of their groups, and the texts of tokens
   *   load: returns the details of the step at a place of `content.steps`
   */
  constructor(content, load) {
    this.content = content;
    this.special = new Set(content.special);
    this.hasServer = content.has_server;
    this.hasTrainer = content.has_trainer;
    this.groups = content.steps.flatMap((one, at) =>
      one.groups.map((group, place) => ({ at, place, step: one.step, ...group })),
    );
    this._describe(this.groups.flatMap((group) => group.sequences));
    this._load = load;
    this._loaded = new Map(); // the newest last
    this._searchable = new Map();
  }

  /** What colours depend on. */
  _describe(sequences) {
    const scores = sequences.map(([score]) => score).filter((score) => score !== null);
    this.rewardRange = [smallest(scores), -smallest(scores.map((score) => -score))];
    this.largestAdvantage = -smallest(sequences.map(([, advantage]) => -Math.abs(advantage ?? 0)));
  }

  async details(group) {
    return (await this._step(group.at)).groups[group.place];
  }

  /** Texts of a group in lower case: the prompt, then each completion. */
  async searchable(group) {
    if (!this._searchable.has(group.at)) {
      const { groups } = await this._step(group.at);
      const texts = groups.map(({ prompt, sequences }) =>
        [prompt, ...sequences].map((part) => this.text(part).toLowerCase()),
      );
      this._searchable.set(group.at, texts);
    }
    return this._searchable.get(group.at)[group.place];
  }

  text(part) {
    return part.text ?? this._texts(part).join("");
  }

  _texts(part) {
    return part.tokens.map((id, position) => part.texts[position] ?? this.content.texts[id] ?? `[${id}]`);
  }

  /** The tokens of a prompt or completion with all that is known of each. */
  tokens(part) {
    const [trained, texts] = [trainedOf(part), this._texts(part)];
    let at = 0;
    return part.tokens.map((id, position) => {
      const token = {
        id,
        position,
        text: texts[position],
        special: this.special.has(id),
        trained: trained[position],
        server: null,
        trainer: null,
        teacher: null,
      };
      if (token.trained) {
        token.teacher = scaled(part.teacher?.[at], LOGPROB_STEPS);
        Object.assign(token, logprobsOf(part, at++));
      }
      return token;
    });
  }

  async _step(at) {
    const found = this._loaded.get(at) ?? this._load(at);
    this._loaded.delete(at);
    this._loaded.set(at, found);
    if (this._loaded.size > 8) this._loaded.delete(this._loaded.keys().next().value);
    return found;
  }
}

const smallest = (values) => values.reduce((least, value) => Math.min(least, value), Infinity);

/** Whether each token is trained on: `runs` are lengths of alternating runs, a trained one first. */
function trainedOf(part) {
  return (part.runs ?? [0, part.tokens.length]).flatMap((length, at) =>
    Array(length).fill(at % 2 === 0),
  );
}

function logprobsOf(part, at) {
  const server = scaled(part.server?.[at], LOGPROB_STEPS);
  const difference = scaled(part.difference?.[at], DIFFERENCE_STEPS);
  if (server === null || difference === null) {
    return { server, trainer: scaled(part.trainer?.[at], LOGPROB_STEPS) };
  }
  return { server, trainer: server + difference, ratio: Math.exp(difference) };
}

const scaled = (value, steps) => (value === null || value === undefined ? null : value / steps);

const counted = (number, name) => `${number.toLocaleString("en")} ${name}${number === 1 ? "" : "s"}`;

const nearestOf = (numbers, wanted) =>
  numbers.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
