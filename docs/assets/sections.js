// A link into a closed section opens it, in browsers that do not do so themselves.
const reveal = () => {
  const section = document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details");
  if (section && !section.open) {
    section.open = true;
    document.getElementById(decodeURIComponent(location.hash.slice(1))).scrollIntoView();
  }
};
addEventListener("hashchange", reveal);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => (one.open = true)));
reveal();
