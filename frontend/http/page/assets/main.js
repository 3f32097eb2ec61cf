// Starts the page: the tabs, the event stream, and the banner for a lost stream.

import { el, markScrolling, setAttr, setText, showText } from "./dom.js";
import { expertsView } from "./experts.js";
import { fleetView } from "./fleet.js";
import { clock, duration } from "./format.js";
import { heard, stream } from "./live.js";
import { requestView } from "./request.js";
import { address, route } from "./router.js";
import { askForToken, token } from "./session.js";
import { now, on } from "./store.js";
import { startTheme } from "./theme.js";
import { throughputView } from "./throughput.js";

const VIEWS = [
  { name: "fleet", title: "Fleet", make: fleetView },
  { name: "throughput", title: "Throughput", make: throughputView },
  { name: "experts", title: "Experts", make: expertsView },
  { name: "request", title: "Request", make: requestView },
];
/** Time after which a lost stream is reported: a short loss may end by itself. */
const QUIET_MS = 2500;
/** Silence of a live stream after which its data counts as old. The service sends the fleet each second. */
const SILENT_MS = 5000;
const LINK_WORDS = { connecting: "connecting", live: "live", lost: "connection lost", denied: "token needed", resting: "disconnected while hidden" };

const main = document.getElementById("main");
const banner = document.getElementById("banner");
const link = document.getElementById("link");
const made = new Map();

function startTabs() {
  const tabs = document.getElementById("tabs");
  for (const { name, title } of VIEWS) {
    tabs.append(el("a", { role: "tab", id: `tab-${name}`, href: address(name), "aria-controls": `view-${name}`, text: title, data: { testid: `tab-${name}` } }));
    main.append(el("div", { role: "tabpanel", id: `view-${name}`, "aria-labelledby": `tab-${name}`, hidden: true }));
  }
  tabs.addEventListener("keydown", (event) => {
    const all = [...tabs.children];
    const at = all.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1, " ": at }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    const tab = all[(to + all.length) % all.length];
    tab.focus();
    tab.click();
  });
}

function showView() {
  const { name } = route();
  const view = VIEWS.find((each) => each.name === name) ?? VIEWS[0];
  for (const each of VIEWS) {
    const is = each === view;
    const tab = document.getElementById(`tab-${each.name}`);
    setAttr(tab, "aria-selected", String(is));
    setAttr(tab, "tabindex", is ? "0" : "-1");
    document.getElementById(`view-${each.name}`).hidden = !is;
  }
  const panel = document.getElementById(`view-${view.name}`);
  if (!made.has(view.name)) {
    made.set(view.name, view.make());
    panel.append(made.get(view.name).root);
  }
  for (const each of VIEWS) if (each !== view) made.get(each.name)?.hide?.();
  document.title = `${view.title} – ${now.hello?.fleet ?? "rollbus"}`;
  made.get(view.name).show(now.fleet);
}

function showLink() {
  const { kind } = now.link;
  const silent = Date.now() - heard.at;
  const isOld = silent > (kind === "live" ? SILENT_MS : QUIET_MS);
  setAttr(link, "data-state", kind);
  setText(link.firstElementChild, kind === "live" ? "●" : ["connecting", "resting"].includes(kind) ? "◌" : "✕");
  setText(document.getElementById("link-text"), LINK_WORDS[kind]);
  document.body.classList.toggle("stale", isOld && now.fleet !== null);
  showText(banner, problemWords(now.link, isOld ? silent : 0));
}

function problemWords({ kind, problem, retryAt }, silent) {
  const fleet = now.fleet;
  if (kind === "denied") return `The service rejected the request: ${problem}.`;
  if (kind === "resting") return "";
  if (silent) {
    const wait = retryAt ? Math.max(0, Math.ceil((retryAt - Date.now()) / 1000)) : 0;
    const next = kind !== "lost" ? "" : wait ? ` Next try in ${wait} s.` : " Trying again.";
    return `No data since ${clock((Date.now() - silent) / 1000)}, for ${duration(Math.round(silent / 1000))}: ${problem ?? "the service sends nothing"}.${next}`;
  }
  if (fleet && !fleet.bus_up) return `The service has no connection to NATS${fleet.problem ? `: ${fleet.problem}` : ""}. The data on this page may be old.`;
  return fleet?.problem ?? "";
}

on("link", ({ kind }) => {
  if (kind === "denied") askForToken(token() ? `The service rejected this token: ${now.link.problem}.` : "The service requires a token. The token for requests shows the fleet. The admin token can also change it.", () => stream.restart());
  showLink();
});
on("fleet", showLink);
on("hello", (hello) => {
  setText(document.getElementById("fleet-name"), hello.fleet);
  document.title = document.title.replace(/–.*$/, `– ${hello.fleet}`);
});
setInterval(() => {
  showLink();
  markScrolling();
}, 1000);
document.addEventListener("scroll", markScrolling, { capture: true, passive: true });

startTheme(document.getElementById("theme-button"));
document.getElementById("token-button").addEventListener("click", () => askForToken("The token for requests shows the fleet. The admin token can also change it.", () => stream.restart()));
document.getElementById("skip").addEventListener("click", (event) => (event.preventDefault(), main.focus()));
startTabs();
window.addEventListener("hashchange", showView);
showView();
stream.restart();
