// Addresses of views: #/NAME?key=value. The back button works, and addresses can be shared.

/** The view and the parameters of the page's address. */
export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: path, params: new URLSearchParams(query ?? "") };
}

/** The address of a view; parameters that are null or empty are left out. */
export function address(name, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) if (value !== null && value !== undefined && value !== "") query.set(key, value);
  const text = query.toString();
  return `#/${name}${text ? `?${text}` : ""}`;
}

/** Write parameters of the current view into the address, without a step for the back button. */
export function setParams(changes) {
  const { name, params } = route();
  const all = { ...Object.fromEntries(params), ...changes };
  history.replaceState(null, "", address(name, all));
}
