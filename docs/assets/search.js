// The search index leaves out the commonest English words, so a query must, too: the theme turns "a" into "a*", with which half of all
// words begin.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (message.type === 2) { // a query
    const words = message.data.split(/\s+/).filter(word => !stopWords.has(word.toLowerCase()));
    message = { ...message, data: words.join(" ") || message.data };
  }
  return post.call(this, message, ...rest);
};
