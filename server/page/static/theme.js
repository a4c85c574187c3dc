// Light, dark, or like the system.

const NAME = "routed-experts-theme";

function remembered() {
  try {
    return localStorage.getItem(NAME) ?? "auto";
  } catch {
    return "auto"; // storage can be switched off
  }
}

function remember(theme) {
  try {
    localStorage.setItem(NAME, theme);
  } catch {
    // storage can be switched off
  }
}

export function watchTheme(select, changed) {
  const apply = () => {
    if (select.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = select.value;
    changed();
  };
  select.value = remembered();
  apply();
  select.addEventListener("change", () => {
    remember(select.value);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
