package demo

// For TestMain, which is outside this package because it needs package cli, which imports this one.
const SpeakerOptions = speakerOptions

var Speak = speak
